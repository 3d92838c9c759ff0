"""The output: one softmax over the slots and the window, a chunk of tokens at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas.mosaic.config import MosaicConfig
from pallas.mosaic.gates import FROM_START, HALVES, LEVELS, WRITER, level_mask
from pallas.mosaic.plan import Plan
from pallas.mosaic.tiles import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    MATRIX,
    RESERVED_BYTES,
    SHARED_MEMORY_BYTES,
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

# Stands for the maximum of no logits: exp2 of minus infinity minus it is 0, not NaN.
EMPTY_MAXIMUM = -1e30


def output(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    slot_query: Float[Array, "B T N H"],
    slot_key: Float[Array, "B Q K H"],
    slot_value: Float[Array, "B Q K V"],
    factors: Float[Array, "B n K places C M"] | None,
    middle: Float[Array, "B n K M"] | None,
    exact,
    states: Float[Array, "B n K M HV"] | None,
    plan: Plan,
    *,
    num_slots: int,
    scale: float,
    near: int,
    far: bool,
    history_tiles: int,
    shift: int,
    config: MosaicConfig,
) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp and slot share of all tokens.

        L[t, m] = scale * (exp(G_t) q_t.SK[m] + sum_{j<=t} D[t, j, m] s_j q_t.k'_j)
        out_t = sum_m p exp(G_t) SV[m] + sum_{j<=t} (sum_m p D[t, j, m] s_j) v'_j + window part

    with p the softmax over slot and window logits together. A program per (chunk, kv head); keys,
    values, states and factors of the chunk stay in shared memory while it goes through the heads
    of the group. Windows of up to `TILE` + 1 tokens are two tiles; further tiles (`far`) stream
    through the same two buffers with a running maximum and sum before them.

    Roofline at shape C, T=32768 (4096 programs, 4 heads): reads queries 537 MB, slot keys, keys and
    values 201 MB, states 134 MB, factors 67 MB; writes 268 MB: 1.2 GB, 0.29 ms at 4.2 TB/s. 20
    products of 64 x 64 x 64 a head, 172 GFLOP, 0.25 ms at 700 TFLOP/s. Measured trials of this
    design are bound by the latency of the chain of products and exponentials in a warpgroup.

    Args:
        query: Rotated queries.
        key: Rotated keys; `history_tiles` tiles before the tokens.
        value: Values of the window, as `key`.
        slot_query: Queries of the slots.
        slot_key: Keys of the tokens written; chunk 0 writes tile `shift`.
        slot_value: Their values.
        factors: From `gates.prepare`; None where slots are not read.
        middle: R of each chunk.
        exact: Which chunks are in the exact form.
        states: Slots before each chunk, in the inputs' dtype.
        plan: Masks.
        num_slots: Slots that exist; the tile's others are masked.
        scale: Factor on all logits.
        near: Window tiles that are always read: 0, 1 or 2.
        far: Whether windows may reach further than two tiles.
        history_tiles: Tiles of history.
        shift: See `slot_key`.
        config: How to run.

    Returns:
        (out [B, T, N, V], log-sum-exp in powers of two [B, N, T], slot share [B, N, T]).
    """
    batch, length, num_heads, width = query.shape
    num_kv_heads, value_width = value.shape[2:]
    group = num_heads // num_kv_heads
    dtype = query.dtype
    chunks = length // TILE
    slot_tiles = 0 if factors is None else factors.shape[-1] // TILE
    warpgroups = config.warpgroups if group % config.warpgroups == 0 and not far else 1
    factor = scale * LOG2E
    square = (TILE, TILE)

    def shared_bytes(warpgroups, buffers):
        tile = TILE * jnp.dtype(dtype).itemsize
        total = 2 * tile * (width + value_width) * (near > 0)
        total += warpgroups * tile * (width * buffers + value_width * (value_width != width))
        if slot_tiles:
            total += (1 + slot_tiles) * tile * (width + value_width)
            total += slot_tiles * (1 + warpgroups) * tile * TILE
        return total + RESERVED_BYTES

    # Rotated and slot queries have a buffer each where both fit.
    buffers = 2 if slot_tiles and near else 1
    if shared_bytes(warpgroups, buffers) > SHARED_MEMORY_BYTES:
        warpgroups = 1
    if shared_bytes(warpgroups, buffers) > SHARED_MEMORY_BYTES:
        buffers = 1
    heads_each = group // warpgroups

    def body(ref):
        chunk, head, row = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        worker = lax.axis_index("warpgroup")
        here = pl.ds(chunk * TILE, TILE)

        def left(index):
            return spare(ref, index, worker)

        def fetch_window(back):
            """Tile `back` before the chunk's own, into buffer `back` mod 2."""
            tile = jnp.maximum(chunk + history_tiles - back, 0)
            source = pl.ds(tile * TILE, TILE)
            slot = remainder(back, 2)
            barrier = ref.window_arrived.at[slot]
            plgpu.copy_gmem_to_smem(ref.key.at[row, source, head], ref.key_s.at[slot], barrier)
            plgpu.copy_gmem_to_smem(ref.value.at[row, source, head], ref.value_s.at[slot], barrier)

        def fetch_query(source, buffer, local):
            plgpu.copy_gmem_to_smem(
                source.at[row, here, head * group + local],
                ref.query_s.at[worker, buffer],
                ref.queried.at[worker, buffer],
            )

        back = ref.tiles_back[row, chunk]
        first = jnp.maximum(back, 1)

        @pl.when(worker == 0)
        def _():
            plgpu.copy_gmem_to_smem(ref.reach.at[row, here], ref.reach_s, ref.reached)
            if near and not far:
                for tile in range(near):
                    fetch_window(jnp.int32(tile))
            if slot_tiles:
                written = pl.ds(jnp.maximum(chunk + shift, 0) * TILE, TILE)
                copy = plgpu.copy_gmem_to_smem
                copy(ref.slot_from.at[row, here], ref.from_s, ref.arrived)
                copy(ref.slot_key.at[row, written, head], ref.slot_key_s, ref.arrived)
                copy(ref.slot_value.at[row, written, head], ref.slot_value_s, ref.arrived)
                for tile in range(slot_tiles):
                    slots = pl.ds(tile * TILE, TILE)
                    state = ref.state.at[row, chunk, head, slots]
                    copy(state.at[:, pl.ds(0, width)], ref.state_key_s.at[tile], ref.arrived)
                    copy(
                        state.at[:, pl.ds(width, value_width)],
                        ref.state_value_s.at[tile],
                        ref.arrived,
                    )
                    copy(ref.middle.at[row, chunk, head, slots], ref.middle_s.at[tile], ref.arrived)
                    for place in (FROM_START, WRITER):
                        # An exact chunk has no WRITER factors: what is copied is not used.
                        source = ref.factor.at[row, chunk, head, place, :, slots]
                        copy(source, ref.factor_s.at[tile, place], ref.arrived)

        slot_buffer = buffers - 1
        one_buffer_for_both = near > 0 and slot_tiles > 0 and buffers == 1

        def fetch_first_query(local):
            """What a head reads first; its slot query too, where that has its own buffer."""
            if near:
                fetch_query(ref.query, 0, local)
            if slot_tiles and not one_buffer_for_both:
                fetch_query(ref.slot_query, slot_buffer, local)

        fetch_first_query(worker * heads_each)
        rows, columns = indices()
        plgpu.barrier_wait(ref.reached)
        if near and not far:
            for tile in range(near):
                plgpu.barrier_wait(ref.window_arrived.at[tile])
        exact_chunk = ref.exact[row, chunk, head] if slot_tiles else jnp.int32(0)
        num_levels = 1 + exact_chunk * len(HALVES)

        def visible(back):
            distance = rows - columns + back * TILE
            return (distance >= 0) & (distance <= over_rows(load(ref.reach_s, BY_ROW)))

        def window_logits(query, back):
            """Logits in powers of two against tile `back`, minus infinity where not visible."""

            def run(accumulated):
                plgpu.wgmma(accumulated, query, ref.key_s.at[remainder(back, 2)].T)
                return accumulated[...]

            logits = pl.run_scoped(run, accumulator(TILE))
            return jnp.where(visible(back), logits * factor, -jnp.inf)

        def level_factors(tile, level):
            """(reader's factors, shared-memory tile of the writer's) of a level.

            Levels of an exact chunk come from global memory, into the warpgroup's own tile: the
            first has that of WRITER, which an exact chunk does not have.
            """

            @pl.when(exact_chunk == 1)
            def _():
                plgpu.commit_smem()  # everyone is done with the level before
                source = ref.factor.at[row, chunk, head, LEVELS + level]
                source = source.at[:, pl.ds(tile * TILE, TILE)]
                barrier = ref.level_arrived.at[worker]
                plgpu.copy_gmem_to_smem(source, ref.factor_s.at[tile, WRITER + worker], barrier)
                plgpu.barrier_wait(barrier)

            place = WRITER + exact_chunk * worker
            reader = load(ref.factor_s.at[tile, exact_chunk * place]).astype(jnp.float32)
            own = (exact_chunk * (level == len(HALVES))).astype(jnp.float32)
            return reader + (1 - reader) * own, ref.factor_s.at[tile, place]

        def one_head(index, _):
            local = worker * heads_each + index
            has_next = index + 1 < heads_each
            if far:
                fetch_window(first)
                fetch_window(first - 1)
            rotated = ref.query_s.at[worker, 0]
            if near:
                plgpu.barrier_wait(ref.queried.at[worker, 0])

            top: Any = None
            total: Any = None
            summed: Any = None
            fade: Any = None
            if far:

                def stream(step, carry):
                    top, total, summed = carry
                    back = first - step
                    slot = remainder(back, 2)
                    plgpu.barrier_wait(ref.window_arrived.at[slot])
                    logits = window_logits(rotated, back)
                    above = jnp.maximum(top, logits.max(axis=1))
                    weights = jnp.exp2(logits - over_rows(above))
                    fade = jnp.exp2(top - above)
                    added = product(weights.astype(dtype), ref.value_s.at[slot], left(0))
                    summed = summed * over_rows(fade, summed.shape) + added
                    plgpu.commit_smem()
                    fetch_window(back - 2)
                    return above, total * fade + weights.sum(axis=1), summed

                def full(value, layout, shape):
                    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

                start = (
                    full(EMPTY_MAXIMUM, BY_ROW, (TILE,)),
                    full(0, BY_ROW, (TILE,)),
                    full(0, MATRIX, (TILE, value_width)),
                )
                top, total, summed = loop(first - 1, stream, start)
                plgpu.barrier_wait(ref.window_arrived.at[1])
                plgpu.barrier_wait(ref.window_arrived.at[0])

            logits = [window_logits(rotated, jnp.int32(tile)) for tile in range(near)]
            slot_logits = []
            if slot_tiles:
                if near:
                    plgpu.commit_smem()  # everyone is done with the rotated queries
                if one_buffer_for_both:
                    fetch_query(ref.slot_query, 0, local)
                elif near:

                    @pl.when(has_next)
                    def _fetch_rotated():
                        fetch_query(ref.query, 0, local + 1)

                @pl.when(index == 0)
                def _():
                    plgpu.barrier_wait(ref.arrived)

                plgpu.barrier_wait(ref.queried.at[worker, slot_buffer])
                reading = ref.query_s.at[worker, slot_buffer]
                since = over_rows(load(ref.from_s, BY_ROW))

                def run(accumulated):
                    plgpu.wgmma(accumulated, reading, ref.slot_key_s.T)
                    return accumulated[...]

                products = pl.run_scoped(run, accumulator(TILE))
                products = jnp.where(columns >= since, products, 0.0)
                for tile in range(slot_tiles):

                    def carried(accumulated, tile=tile):
                        plgpu.wgmma(accumulated, reading, ref.state_key_s.at[tile].T)
                        return accumulated[...]

                    from_start = load(ref.factor_s.at[tile, FROM_START]).astype(jnp.float32)
                    carry = from_start * over_columns(
                        jnp.exp(load(ref.middle_s.at[tile], BY_COLUMN))
                    )
                    carry = jnp.where(since < 0, carry, 0.0)
                    carried_logits = carry * pl.run_scoped(carried, accumulator(TILE))

                    def spread(level, so_far, tile=tile):
                        reader, writer_s = level_factors(tile, level)
                        mask = level_mask(rows, columns, level, exact_chunk)
                        masked = jnp.where(mask, products, 0.0).astype(dtype)
                        return so_far + product(masked, writer_s, left(0)) * reader

                    raw = loop(num_levels, spread, carried_logits)
                    exists = (since < TILE) & (columns + tile * TILE < num_slots)
                    slot_logits.append(jnp.where(exists, raw * factor, -jnp.inf))

            highest = plgpu.layout_cast(jnp.full((TILE,), EMPTY_MAXIMUM, jnp.float32), BY_ROW)
            for tile_logits in logits + slot_logits:
                highest = jnp.maximum(highest, tile_logits.max(axis=1))
            if far:
                highest = jnp.maximum(highest, top)
            spread_highest = over_rows(highest)
            weights = [jnp.exp2(x - spread_highest) for x in logits]
            slot_weights = [jnp.exp2(x - spread_highest) for x in slot_logits]
            on_slots = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
            for x in slot_weights:
                on_slots = on_slots + x.sum(axis=1)
            mass = on_slots
            for x in weights:
                mass = mass + x.sum(axis=1)
            if far:
                fade = jnp.exp2(top - highest)
                mass = mass + total * fade

            mixed = None
            carried_weights = []
            for tile in range(slot_tiles):

                def collect(level, so_far, tile=tile):
                    reader, writer_s = level_factors(tile, level)
                    mask = level_mask(rows, columns, level, exact_chunk)
                    scaled = (slot_weights[tile] * reader).astype(dtype)
                    return so_far + jnp.where(mask, product(scaled, writer_s.T, left(0)), 0.0)

                if mixed is None:
                    mixed = plgpu.layout_cast(jnp.zeros(square, jnp.float32), MATRIX)
                mixed = loop(num_levels, collect, mixed)
                from_start = load(ref.factor_s.at[tile, FROM_START]).astype(jnp.float32)
                carry = from_start * over_columns(jnp.exp(load(ref.middle_s.at[tile], BY_COLUMN)))
                carry = jnp.where(over_rows(load(ref.from_s, BY_ROW)) < 0, carry, 0.0)
                carried_weights.append((slot_weights[tile] * carry).astype(dtype))
            if mixed is not None:
                since = over_rows(load(ref.from_s, BY_ROW))
                mixed = jnp.where(columns >= since, mixed, 0.0).astype(dtype)

            def read_values(accumulated):
                for tile in range(near):
                    multiply(
                        accumulated, weights[tile].astype(dtype), ref.value_s.at[tile], left(tile)
                    )
                for tile in range(slot_tiles):
                    multiply(
                        accumulated,
                        carried_weights[tile],
                        ref.state_value_s.at[tile],
                        left(2 + tile),
                    )
                if mixed is not None:
                    multiply(accumulated, mixed, ref.slot_value_s, left(4))
                return accumulated[...]

            result = pl.run_scoped(read_values, accumulator(value_width))
            if far:
                result = result + summed * over_rows(fade, result.shape)
            present = mass > 0
            per_mass = 1 / jnp.where(present, mass, 1.0)
            result = result * over_rows(per_mass, result.shape)

            # The store of the head before has left the buffers: it was awaited below.
            plgpu.commit_smem()  # and everyone is done with the queries
            destination = (
                ref.out_s.at[worker]
                if value_width != width
                else ref.query_s.at[worker, slot_buffer]
            )
            destination[...] = result.astype(dtype)
            ref.row_s[worker, 0] = jnp.where(
                present, highest + jnp.log2(jnp.where(present, mass, 1.0)), 0.0
            )
            ref.row_s[worker, 1] = on_slots * per_mass
            plgpu.commit_smem()
            absolute = head * group + local
            plgpu.copy_smem_to_gmem(destination, ref.out.at[row, here, absolute])
            plgpu.copy_smem_to_gmem(ref.row_s.at[worker, 0], ref.lse.at[row, absolute, here])
            plgpu.copy_smem_to_gmem(ref.row_s.at[worker, 1], ref.share.at[row, absolute, here])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()

            @pl.when(has_next)
            def _fetch_next():
                if near and slot_tiles and not one_buffer_for_both:
                    fetch_query(ref.slot_query, slot_buffer, local + 1)
                else:
                    fetch_first_query(local + 1)

            return

        loop(heads_each, one_head, None)
        plgpu.wait_smem_to_gmem(0)

    inputs: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "slot_query": slot_query,
        "reach": plan.reach,
        "tiles_back": plan.tiles_back,
    }
    scratch = {
        "query_s": tile_ref((warpgroups, buffers, TILE, width), dtype),
        "reach_s": plgpu.SMEM((TILE,), jnp.int32),
        "row_s": plgpu.SMEM((warpgroups, 2, TILE), jnp.float32),
        "reached": plgpu.Barrier(),
        "queried": plgpu.Barrier(num_barriers=(warpgroups, buffers)),
    }
    if value_width != width:
        scratch["out_s"] = tile_ref((warpgroups, TILE, value_width), dtype)
    if near:
        scratch["key_s"] = tile_ref((2, TILE, width), dtype)
        scratch["value_s"] = tile_ref((2, TILE, value_width), dtype)
        scratch["window_arrived"] = plgpu.Barrier(num_arrivals=2, num_barriers=2)
    if slot_tiles:
        inputs |= {
            "slot_key": slot_key,
            "slot_value": slot_value,
            "slot_from": plan.slot_from,
            "factor": factors,
            "middle": middle,
            "exact": exact,
            "state": states,
        }
        scratch |= {
            "slot_key_s": tile_ref((TILE, width), dtype),
            "slot_value_s": tile_ref((TILE, value_width), dtype),
            "state_key_s": tile_ref((slot_tiles, TILE, width), dtype),
            "state_value_s": tile_ref((slot_tiles, TILE, value_width), dtype),
            "factor_s": tile_ref((slot_tiles, 1 + warpgroups, TILE, TILE), dtype),
            "middle_s": plgpu.SMEM((slot_tiles, TILE), jnp.float32),
            "from_s": plgpu.SMEM((TILE,), jnp.int32),
            "arrived": plgpu.Barrier(num_arrivals=3 + 5 * slot_tiles),
            "level_arrived": plgpu.Barrier(num_barriers=warpgroups),
        }
    rows = jax.ShapeDtypeStruct((batch, num_heads, length), jnp.float32)
    out = jax.ShapeDtypeStruct((*query.shape[:3], value_width), dtype)
    results = launch(
        body,
        "nha_output",
        inputs=inputs,
        outputs={"out": out, "lse": rows, "share": rows},
        scratch=scratch | spare_tiles(config, 5, dtype, warpgroups),
        grid={"chunk": chunks, "head": num_kv_heads, "batch": batch},
        warpgroups=warpgroups,
    )
    return results["out"], results["lse"], results["share"]
