"""Gradients of the window: queries, keys and values, from the joint log-sum-exp.

With the log-sum-exp of the whole softmax the window's weights need nothing of the slots:

    p[t, j] = exp(scale * query_t.key_j - lse_t)
    dS[t, j] = p[t, j] (dout_t.value_j - delta_t),   delta_t = dout_t.out_t + dshare_t share_t
    dquery_t = scale sum_j dS[t, j] key_j,  dkey_j = scale sum_t dS[t, j] query_t,
    dvalue_j = sum_t p[t, j] dout_t
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas.mosaic.config import MosaicConfig
from pallas.mosaic.plan import Plan
from pallas.mosaic.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    MATRIX,
    TILE,
    accumulator,
    indices,
    launch,
    load,
    loop,
    multiply,
    over_columns,
    over_rows,
    product,
    remainder,
    spare,
    spare_tiles,
    tile_ref,
)


def window_query_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    cotangent: Float[Array, "B T N V"],
    lse: Float[Array, "B N T"],
    delta: Float[Array, "B N T"],
    plan: Plan,
    *,
    scale: float,
    near: int,
    far: bool,
    history_tiles: int,
    config: MosaicConfig,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Gradient of the rotated queries, and the window's part of delta (sum of p dout.value).

    Tiles and loops as in `forward.output`.

    Roofline at shape C, T=32768 (4096 programs, 4 heads): reads queries and cotangents, keys and
    values, 0.67 GB, writes 0.27 GB: 0.22 ms at 4.2 TB/s. 12 products of 64 x 64 x 64 a head, 103
    GFLOP, 0.15 ms at 700 TFLOP/s. Bound by traffic and by the latency of its chain.
    """
    batch, length, num_heads, width = query.shape
    num_kv_heads, value_width = value.shape[2:]
    group = num_heads // num_kv_heads
    dtype = query.dtype
    chunks = length // TILE
    warpgroups = config.warpgroups if group % config.warpgroups == 0 and not far else 1
    heads_each = group // warpgroups
    factor = scale * LOG2E

    def body(ref):
        chunk, head, row = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        worker = lax.axis_index("warpgroup")
        here = pl.ds(chunk * TILE, TILE)
        first = jnp.maximum(ref.tiles_back[row, chunk], 1)

        def fetch_window(back):
            tile = jnp.maximum(chunk + history_tiles - back, 0)
            source = pl.ds(tile * TILE, TILE)
            slot = remainder(back, 2)
            barrier = ref.window_arrived.at[slot]
            plgpu.copy_gmem_to_smem(ref.key.at[row, source, head], ref.key_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(ref.value.at[row, source, head], ref.value_s.at[slot], barrier)

        @pl.when(worker == 0)
        def _():
            plgpu.copy_gmem_to_smem(ref.reach.at[row, here], ref.reach_s, ref.arrived)
            if not far:
                for tile in range(near):
                    fetch_window(jnp.int32(tile))

        queries, cotangents = ref.query_s.at[worker], ref.cotangent_s.at[worker]
        rows_s = ref.row_s.at[worker]
        first_head = head * group + worker * heads_each

        def fetch_head(absolute):
            copy, barrier = plgpu.copy_gmem_to_smem, ref.queried.at[worker]
            copy(ref.query.at[row, here, absolute], queries, barrier)
            copy(ref.cotangent.at[row, here, absolute], cotangents, barrier)
            copy(ref.lse.at[row, absolute, here], rows_s.at[0], barrier)
            copy(ref.delta.at[row, absolute, here], rows_s.at[1], barrier)

        fetch_head(first_head)
        rows, columns = indices()
        plgpu.barrier_wait(ref.arrived)
        if not far:
            for tile in range(near):
                plgpu.barrier_wait(ref.window_arrived.at[tile])

        def logit_gradients(back):
            """DS of tile `back`, and the sum over its keys of p dout.value."""
            slot = remainder(back, 2)

            def run(logits, weighted):
                plgpu.wgmma(logits, queries, ref.key_s.at[slot].T)
                plgpu.wgmma(weighted, cotangents, ref.value_s.at[slot].T)
                return plgpu.wgmma_accumulator_load(logits, wait_n=1), weighted[...]

            logits, weighted = pl.run_scoped(run, accumulator(TILE), accumulator(TILE))
            weights = jnp.exp2(logits * factor - over_rows(load(ref.row_s.at[worker, 0], BY_ROW)))
            distance = rows - columns + back * TILE
            visible = (distance >= 0) & (distance <= over_rows(load(ref.reach_s, BY_ROW)))
            weights = jnp.where(visible, weights, 0.0)
            gradients = weights * (weighted - over_rows(load(ref.row_s.at[worker, 1], BY_ROW)))
            return gradients.astype(dtype), (weights * weighted).sum(axis=1)

        def one_head(index, _):
            absolute = first_head + index
            if far:
                fetch_window(first)
                fetch_window(first - 1)
            plgpu.barrier_wait(ref.queried.at[worker])
            summed: Any = None
            along = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
            if far:

                def stream(step, carry):
                    summed, along = carry
                    back = first - step
                    slot = remainder(back, 2)
                    plgpu.barrier_wait(ref.window_arrived.at[slot])
                    gradients, part = logit_gradients(back)
                    summed = summed + product(gradients, ref.key_s.at[slot], spare(ref, 0, worker))
                    plgpu.commit_smem()
                    fetch_window(back - 2)
                    return summed, along + part

                start = plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), MATRIX)
                summed, along = loop(first - 1, stream, (start, along))
                plgpu.barrier_wait(ref.window_arrived.at[1])
                plgpu.barrier_wait(ref.window_arrived.at[0])
            gradients = []
            for tile in range(near):
                gradient, part = logit_gradients(jnp.int32(tile))
                gradients.append(gradient)
                along = along + part

            def read_keys(accumulated):
                for tile in range(near):
                    left = spare(ref, tile, worker)
                    multiply(accumulated, gradients[tile], ref.key_s.at[tile], left)
                return accumulated[...]

            result = pl.run_scoped(read_keys, accumulator(width))
            if far:
                result = result + summed
            plgpu.commit_smem()  # everyone is done with the queries
            queries[...] = (result * scale).astype(dtype)
            rows_s[2] = along
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows_s.at[2], ref.along.at[row, absolute, here])
            plgpu.copy_smem_to_gmem(queries, ref.gradient.at[row, here, absolute])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()

            @pl.when(index + 1 < heads_each)
            def _fetch_next():
                fetch_head(absolute + 1)

            return

        loop(heads_each, one_head, None)
        plgpu.wait_smem_to_gmem(0)

    scratch = {
        "query_s": tile_ref((warpgroups, TILE, width), dtype),
        "cotangent_s": tile_ref((warpgroups, TILE, value_width), dtype),
        "row_s": plgpu.SMEM((warpgroups, 3, TILE), jnp.float32),
        "reach_s": plgpu.SMEM((TILE,), jnp.int32),
        "key_s": tile_ref((2, TILE, width), dtype),
        "value_s": tile_ref((2, TILE, value_width), dtype),
        "arrived": plgpu.Barrier(),
        "queried": plgpu.Barrier(num_arrivals=4, num_barriers=warpgroups),
        "window_arrived": plgpu.Barrier(num_arrivals=2, num_barriers=2),
    }
    results = launch(
        body,
        "nha_window_query_gradient",
        inputs={
            "query": query,
            "key": key,
            "value": value,
            "cotangent": cotangent,
            "lse": lse,
            "delta": delta,
            "reach": plan.reach,
            "tiles_back": plan.tiles_back,
        },
        outputs={
            "gradient": jax.ShapeDtypeStruct(query.shape, dtype),
            "along": jax.ShapeDtypeStruct(lse.shape, jnp.float32),
        },
        scratch=scratch | spare_tiles(config, 2, dtype, warpgroups),
        grid={"chunk": chunks, "head": num_kv_heads, "batch": batch},
        warpgroups=warpgroups,
    )
    return results["gradient"], results["along"]


def window_key_gradient(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    cotangent: Float[Array, "B T N V"],
    lse: Float[Array, "B N T"],
    delta: Float[Array, "B N T"],
    plan: Plan,
    *,
    scale: float,
    history_tiles: int,
    config: MosaicConfig,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Gradients of rotated keys and values.

    A program per (key tile, kv head) goes through the chunks whose windows reach into the tile and
    the heads of the group, with the next one's loads under way, and sums in its accumulators: no
    atomics, the same result every time.

    Roofline at shape C, T=32768 (4096 programs, 2 chunks x 4 heads): reads queries and cotangents
    twice, once from memory, 0.67 GB, writes 0.13 GB: 0.19 ms at 4.2 TB/s. 16 products of
    64 x 64 x 64 for each pair, 137 GFLOP, 0.20 ms at 700 TFLOP/s.
    """
    batch, _, num_heads, width = query.shape
    num_kv_heads, value_width = value.shape[2:]
    group = num_heads // num_kv_heads
    dtype = query.dtype
    tiles = key.shape[1] // TILE
    factor = scale * LOG2E
    stages = 2

    def body(ref):
        tile, head, row = (lax.axis_index(name) for name in ("tile", "head", "batch"))
        here = pl.ds(tile * TILE, TILE)
        earliest = jnp.maximum(tile - history_tiles, 0)
        readers = jnp.maximum(ref.last_reader[row, tile] - earliest + 1, 0)
        steps = readers * group
        plgpu.copy_gmem_to_smem(ref.key.at[row, here, head], ref.key_s, ref.arrived)
        plgpu.copy_gmem_to_smem(ref.value.at[row, here, head], ref.value_s, ref.arrived)

        def chunk_of(step):
            return earliest + lax.div(step, jnp.int32(group))

        def fetch(step, stage):
            absolute = head * group + remainder(step, group)
            tokens = pl.ds(chunk_of(step) * TILE, TILE)
            barrier = ref.read.at[stage]
            copy = plgpu.copy_gmem_to_smem
            copy(ref.query.at[row, tokens, absolute], ref.query_s.at[stage], barrier)
            copy(ref.cotangent.at[row, tokens, absolute], ref.cotangent_s.at[stage], barrier)
            copy(ref.lse.at[row, absolute, tokens], ref.row_s.at[stage, 0], barrier)
            copy(ref.delta.at[row, absolute, tokens], ref.row_s.at[stage, 1], barrier)
            copy(ref.reach.at[row, tokens], ref.reach_s.at[stage], barrier)

        for stage in range(stages):

            @pl.when(stage < steps)
            def _fetch_first(stage=stage):
                fetch(jnp.int32(stage), stage)

        rows, columns = indices()
        plgpu.barrier_wait(ref.arrived)

        def sums(key_sum, value_sum):
            def one(step, _):
                stage = remainder(step, stages)
                plgpu.barrier_wait(ref.read.at[stage])
                queries, cotangents = ref.query_s.at[stage], ref.cotangent_s.at[stage]

                def run(logits, weighted):
                    plgpu.wgmma(logits, ref.key_s, queries.T)
                    plgpu.wgmma(weighted, ref.value_s, cotangents.T)
                    return plgpu.wgmma_accumulator_load(logits, wait_n=1), weighted[...]

                logits, weighted = pl.run_scoped(run, accumulator(TILE), accumulator(TILE))
                lse_row = over_columns(load(ref.row_s.at[stage, 0], BY_COLUMN))
                delta_row = over_columns(load(ref.row_s.at[stage, 1], BY_COLUMN))
                reach_row = over_columns(load(ref.reach_s.at[stage], BY_COLUMN))
                distance = columns - rows + (chunk_of(step) + history_tiles - tile) * TILE
                visible = (distance >= 0) & (distance <= reach_row)
                weights = jnp.where(visible, jnp.exp2(logits * factor - lse_row), 0.0)
                gradients = weights * (weighted - delta_row)
                multiply(value_sum, weights.astype(dtype), cotangents, spare(ref, 0))
                multiply(key_sum, gradients.astype(dtype), queries, spare(ref, 1))
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()

                @pl.when(step + stages < steps)
                def _fetch_next():
                    fetch(step + stages, stage)

                return

            loop(steps, one, None)
            return key_sum[...], value_sum[...]

        key_sum, value_sum = pl.run_scoped(sums, accumulator(width), accumulator(value_width))
        ref.key_s[...] = (key_sum * scale).astype(dtype)
        ref.value_s[...] = value_sum.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref.key_s, ref.key_gradient.at[row, here, head])
        plgpu.copy_smem_to_gmem(ref.value_s, ref.value_gradient.at[row, here, head])
        plgpu.wait_smem_to_gmem(0)

    scratch = {
        "key_s": tile_ref((TILE, width), dtype),
        "value_s": tile_ref((TILE, value_width), dtype),
        "query_s": tile_ref((stages, TILE, width), dtype),
        "cotangent_s": tile_ref((stages, TILE, value_width), dtype),
        "row_s": plgpu.SMEM((stages, 2, TILE), jnp.float32),
        "reach_s": plgpu.SMEM((stages, TILE), jnp.int32),
        "arrived": plgpu.Barrier(num_arrivals=2),
        "read": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
    }
    results = launch(
        body,
        "nha_window_key_gradient",
        inputs={
            "query": query,
            "key": key,
            "value": value,
            "cotangent": cotangent,
            "lse": lse,
            "delta": delta,
            "reach": plan.reach,
            "last_reader": plan.last_reader,
        },
        outputs={
            "key_gradient": jax.ShapeDtypeStruct(key.shape, dtype),
            "value_gradient": jax.ShapeDtypeStruct(value.shape, dtype),
        },
        scratch=scratch | spare_tiles(config, 2, dtype),
        grid={"tile": tiles, "head": num_kv_heads, "batch": batch},
    )
    return results["key_gradient"], results["value_gradient"]
