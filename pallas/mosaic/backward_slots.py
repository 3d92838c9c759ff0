"""Gradients of what the slots are read for: slot queries, states, writes and gates.

Letters as in `gates`: A[t, j] = q_t.k'_j and B[t, j] = dout_t.v'_j, D s the decays times strength,
e = exp(G) the decay from the chunk's start, p the weights on slots.

    L  = e (q SK) + sum_j D s A           raw logits (without scale)
    dP = e (dout SV) + sum_j D s B        gradient of p, but for the slot share's
    dL = scale p (dP + dshare - delta)
    dq = (dL e) SK + Mk k',     Mk[t, j] = sum_m dL D s,   Mp[t, j] = sum_m p D s
    dSK = (dL e)^T q, dSV = (p e)^T dout, dk' = Mk^T q, dv' = Mp^T dout   (`slot_sums`)

and for the gates, with P[t, j, m] = D s (dL A + p B) of a pair (reader t, writer j): gate i is
passed by the pairs with j < i <= t and by what was there before the chunk, so it gets the sum of P
over these. In the one-reference form that is the sum over t >= i of (row sums of P minus column
sums of P); in the exact form level by level, row sums for gates right of a block's middle and
column sums left of it, never a difference. The strength of writer j gets its column sum without s.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas.mosaic.config import MosaicConfig
from pallas.mosaic.gates import (
    FROM_START,
    HALVES,
    LEVELS,
    LEVELS_BARE,
    WRITER,
    WRITER_BARE,
    level_bounds,
    level_mask,
)
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
    over_columns,
    over_rows,
    remainder,
    tile_ref,
)

# Parts of the matrices that `slot_gradient` hands to `slot_sums`, in pairs for the key side and the
# value side: weights on states before the chunk, and on the writes inside it.
CARRIED_KEY, MIXED_KEY, CARRIED_VALUE, MIXED_VALUE = range(4)


def slot_gradient(
    slot_query: Float[Array, "B T N H"],
    slot_key: Float[Array, "B Q K H"],
    slot_value: Float[Array, "B Q K V"],
    cotangent: Float[Array, "B T N V"],
    share_cotangent: Float[Array, "B N T"],
    lse: Float[Array, "B N T"],
    delta: Float[Array, "B N T"],
    factors: Float[Array, "B n K places C M"],
    middle: Float[Array, "B n K M"],
    exact,
    states: Float[Array, "B n K M HV"],
    plan: Plan,
    *,
    num_slots: int,
    scale: float,
    shift: int,
    measure: bool,
    config: MosaicConfig,
) -> dict[str, Array]:
    """Gradients of the slot queries and of the gates passed, and the matrices of `slot_sums`.

    A program per (chunk, kv head, tile of `TILE` slots); the heads of the group one after another.

    Roofline at shape C, T=32768 (4096 programs, 4 heads): reads queries and cotangents 537 MB, slot
    keys, values and states 268 MB, factors 100 MB, writes query gradients 268 MB, matrices 537 MB,
    gate terms 134 MB: 1.8 GB, 0.44 ms at 4.2 TB/s. 20 products of 64 x 64 x 64 a head, 172 GFLOP,
    0.25 ms at 700 TFLOP/s.

    Returns:
        With `measure` only "along" [tiles, B, N, T], the slots' part of delta from the very
        products that the gradients are made of. Otherwise "query" [tiles, B, T, N, H], a part for
        each tile of slots; "matrices" [B, N, tiles, 4, T, TILE]; "gate" and "strength"
        [B, n, K, workers, C, M] float32, the gate terms described above, a part for each warpgroup.
    """
    batch, length, num_heads, width = slot_query.shape
    num_kv_heads, value_width = slot_value.shape[2:]
    group = num_heads // num_kv_heads
    dtype = slot_query.dtype
    chunks = length // TILE
    padded_slots = factors.shape[-1]
    slot_tiles = padded_slots // TILE
    factor = scale * LOG2E
    square = (TILE, TILE)
    query_dtype = dtype if slot_tiles == 1 else jnp.float32

    def shared_bytes(warpgroups):
        tile = TILE * jnp.dtype(dtype).itemsize
        total = (2 + warpgroups) * tile * (width + value_width)
        return total + (2 + 5 * warpgroups) * tile * TILE + RESERVED_BYTES

    warpgroups = config.warpgroups if group % config.warpgroups == 0 else 1
    if shared_bytes(warpgroups) > SHARED_MEMORY_BYTES:
        warpgroups = 1
    heads_each = group // warpgroups

    def body(ref):
        names = ("chunk", "head", "tile", "batch")
        chunk, head, tile, row = (lax.axis_index(name) for name in names)
        worker = lax.axis_index("warpgroup")
        here = pl.ds(chunk * TILE, TILE)
        slots = pl.ds(tile * TILE, TILE)
        own_factors = ref.factor.at[row, chunk, head]
        copy = plgpu.copy_gmem_to_smem

        @pl.when(worker == 0)
        def _():
            written = pl.ds(jnp.maximum(chunk + shift, 0) * TILE, TILE)
            state = ref.state.at[row, chunk, head, slots]
            copy(ref.slot_from.at[row, here], ref.from_s, ref.arrived)
            copy(ref.slot_key.at[row, written, head], ref.slot_key_s, ref.arrived)
            copy(ref.slot_value.at[row, written, head], ref.slot_value_s, ref.arrived)
            copy(state.at[:, pl.ds(0, width)], ref.state_key_s, ref.arrived)
            copy(state.at[:, pl.ds(width, value_width)], ref.state_value_s, ref.arrived)
            copy(ref.middle.at[row, chunk, head, slots], ref.middle_s, ref.arrived)
            for place in (FROM_START, WRITER):
                copy(own_factors.at[place, :, slots], ref.factor_s.at[place], ref.arrived)

        queries, cotangents = ref.query_s.at[worker], ref.cotangent_s.at[worker]
        rows_s = ref.row_s.at[worker]
        first_head = head * group + worker * heads_each

        def fetch_head(absolute):
            barrier = ref.queried.at[worker]
            copy(ref.queries.at[row, here, absolute], queries, barrier)
            copy(ref.cotangent.at[row, here, absolute], cotangents, barrier)
            copy(ref.lse.at[row, absolute, here], rows_s.at[0], barrier)
            copy(ref.delta.at[row, absolute, here], rows_s.at[1], barrier)
            copy(ref.share.at[row, absolute, here], rows_s.at[2], barrier)

        def fetch_next_head(index):
            @pl.when(index + 1 < heads_each)
            def _():
                fetch_head(first_head + index + 1)

        fetch_head(first_head)
        rows, columns = indices()
        plgpu.barrier_wait(ref.arrived)
        exact_chunk = ref.exact[row, chunk, head]
        num_levels = 1 + exact_chunk * len(HALVES)
        # Matrices on their way to products that need them in shared memory, and out.
        matrix = [ref.matrix_s.at[worker, index] for index in range(4)]
        gate_out: Any = None
        strength_out: Any = None
        if not measure:
            gate_out = ref.gate.at[row, chunk, head, worker, :, slots]
            strength_out = ref.strength.at[row, chunk, head, worker, :, slots]

        def since():
            return over_rows(load(ref.from_s, BY_ROW))

        def carry():
            """Decay from the chunk's start for rows that see what was there before it."""
            from_start = load(ref.factor_s.at[FROM_START]).astype(jnp.float32)
            decay = from_start * over_columns(jnp.exp(load(ref.middle_s, BY_COLUMN)))
            return jnp.where(since() < 0, decay, 0.0)

        def level_factors(level):
            """(reader's factors, tile of the writer's, writer's without strength) of a level."""
            last = exact_chunk * (level == len(HALVES)).astype(jnp.int32)

            @pl.when(exact_chunk == 1)
            def _():
                plgpu.commit_smem()  # everyone is done with the level before
                barrier = ref.level_arrived.at[worker]
                source = own_factors.at[LEVELS + level, :, slots]
                copy(source, ref.factor_s.at[WRITER + worker], barrier)
                plgpu.barrier_wait(barrier)

            place = WRITER + exact_chunk * worker
            own = last.astype(jnp.float32)
            reader = load(ref.factor_s.at[exact_chunk * place]).astype(jnp.float32)
            reader = reader + (1 - reader) * own
            bare_place = WRITER_BARE + exact_chunk * (LEVELS_BARE - WRITER_BARE + level)
            bare_place = bare_place * (1 - last) + (LEVELS + len(HALVES)) * last

            def bare():
                source = own_factors.at[bare_place, :, slots]
                factor = plgpu.load(source, layout=MATRIX, optimized=False)
                factor = factor.astype(jnp.float32)
                return factor + (1 - factor) * own

            return reader, ref.factor_s.at[place], bare

        def masked_sums(mask, terms):
            """For each row of a mask the sum of float32 rows, split into two tiles of the dtype."""
            high = terms.astype(dtype)
            plgpu.commit_smem()  # everyone is done with the matrices
            matrix[0][...] = jnp.where(mask, 1.0, 0.0).astype(dtype)
            matrix[2][...] = high
            matrix[3][...] = (terms - high.astype(jnp.float32)).astype(dtype)
            plgpu.commit_smem()

            def run(accumulated):
                plgpu.wgmma(accumulated, matrix[0], matrix[2])
                plgpu.wgmma(accumulated, matrix[0], matrix[3])
                return accumulated[...]

            return pl.run_scoped(run, accumulator(TILE))

        def one_head(index, sums):
            rest_sum, strength_sum = sums
            absolute = first_head + index
            plgpu.barrier_wait(ref.queried.at[worker])

            def products(first, second):
                plgpu.wgmma(first, queries, ref.slot_key_s.T)
                plgpu.wgmma(second, cotangents, ref.slot_value_s.T)
                return plgpu.wgmma_accumulator_load(first, wait_n=1), second[...]

            key_products, value_products = pl.run_scoped(
                products, accumulator(TILE), accumulator(TILE)
            )
            seen = columns >= since()
            key_products = jnp.where(seen, key_products, 0.0).astype(dtype)
            value_products = jnp.where(seen, value_products, 0.0).astype(dtype)

            def carried(first, second):
                plgpu.wgmma(first, queries, ref.state_key_s.T)
                plgpu.wgmma(second, cotangents, ref.state_value_s.T)
                return plgpu.wgmma_accumulator_load(first, wait_n=1), second[...]

            first, second = pl.run_scoped(carried, accumulator(TILE), accumulator(TILE))
            decay = carry()

            def on_level(products, level):
                mask = level_mask(rows, columns, level, exact_chunk)
                return jnp.where(mask, products.astype(jnp.float32), 0.0).astype(dtype)

            def put_products(level):
                plgpu.commit_smem()  # everyone is done with the matrices
                matrix[0][...] = on_level(key_products, level)
                matrix[1][...] = on_level(value_products, level)
                plgpu.commit_smem()

            def spread(level, so_far):
                reader, writer_s, _ = level_factors(level)
                put_products(level)

                def run(first, second):
                    plgpu.wgmma(first, matrix[0], writer_s)
                    plgpu.wgmma(second, matrix[1], writer_s)
                    return plgpu.wgmma_accumulator_load(first, wait_n=1), second[...]

                first, second = pl.run_scoped(run, accumulator(TILE), accumulator(TILE))
                return so_far[0] + reader * first, so_far[1] + reader * second

            logits, weighted = loop(num_levels, spread, (decay * first, decay * second))
            exists = (since() < TILE) & (columns + tile * TILE < num_slots)
            weights = jnp.exp2(logits * factor - over_rows(load(rows_s.at[0], BY_ROW)))
            weights = jnp.where(exists, weights, 0.0)
            if measure:
                along = weights * (weighted + over_rows(load(rows_s.at[2], BY_ROW)))
                rows_s[3] = along.sum(axis=1)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(rows_s.at[3], ref.along.at[tile, row, absolute, here])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()
                fetch_next_head(index)
                return sums
            off = load(rows_s.at[2], BY_ROW) - load(rows_s.at[1], BY_ROW)
            gradients = scale * weights * (weighted + over_rows(off))
            rest = gradients * logits + weights * weighted

            def gather(level, so_far):
                """Matrices over the writes of a level, and its gate terms."""
                mixed_key, mixed_value, rest, strength = so_far
                reader, writer_s, bare = level_factors(level)
                mask = level_mask(rows, columns, level, exact_chunk)
                read_gradients = (gradients * reader).astype(dtype)
                read_weights = (weights * reader).astype(dtype)

                @pl.when(exact_chunk == 1)
                def _():
                    put_products(level)  # else those of the only level are there already

                matrix[2][...] = read_gradients
                matrix[3][...] = read_weights
                plgpu.commit_smem()

                def mix(first, second):
                    plgpu.wgmma(first, matrix[2], writer_s.T)
                    plgpu.wgmma(second, matrix[3], writer_s.T)
                    return plgpu.wgmma_accumulator_load(first, wait_n=1), second[...]

                first, second = pl.run_scoped(mix, accumulator(TILE), accumulator(TILE))
                mixed_key = mixed_key + jnp.where(mask, first, 0.0)
                mixed_value = mixed_value + jnp.where(mask, second, 0.0)

                def by_writer(accumulated):
                    plgpu.wgmma(accumulated, matrix[0].T, matrix[2])
                    plgpu.wgmma(accumulated, matrix[1].T, matrix[3])
                    return accumulated[...]

                written = pl.run_scoped(by_writer, accumulator(TILE))
                strength = strength + written * bare()
                written = written * load(writer_s).astype(jnp.float32)

                def exact_gates(written):
                    """Adds the level to the gates it passes; gives its row sums.

                    Row and column sums of a level lie in different rows, but for j = t, which
                    passes no gate: `inside` is empty there.
                    """

                    def by_reader(products):
                        def run(accumulated):
                            plgpu.wgmma(accumulated, products, writer_s)
                            return accumulated[...]

                        return pl.run_scoped(run, accumulator(TILE))

                    read = gradients * by_reader(matrix[0]) + weights * by_reader(matrix[1])
                    read = read * reader
                    half, _ = level_bounds(level, exact_chunk)
                    inside = (rows ^ columns) < half
                    right = ((rows & half) != 0) & (columns >= rows)
                    passed = right | (((rows & half) == 0) & (columns < rows))
                    levels = plgpu.load(gate_out, layout=MATRIX, optimized=False)
                    gate_out[...] = levels + masked_sums(inside & passed, read + written)
                    return read

                read = lax.cond(exact_chunk == 1, exact_gates, lambda written: written, written)
                plgpu.commit_smem()
                return mixed_key, mixed_value, rest - read, strength

            zero = plgpu.layout_cast(jnp.zeros(square, jnp.float32), MATRIX)
            mixed_key, mixed_value, rest, strength_sum = loop(
                num_levels, gather, (zero, zero, rest, strength_sum)
            )
            seen = columns >= since()
            mixed_key = jnp.where(seen, mixed_key, 0.0).astype(dtype)
            mixed_value = jnp.where(seen, mixed_value, 0.0).astype(dtype)
            decay = carry()
            matrix[CARRIED_KEY][...] = (gradients * decay).astype(dtype)
            matrix[MIXED_KEY][...] = mixed_key
            matrix[CARRIED_VALUE][...] = (weights * decay).astype(dtype)
            matrix[MIXED_VALUE][...] = mixed_value
            plgpu.commit_smem()
            for part in range(4):
                plgpu.copy_smem_to_gmem(
                    matrix[part], ref.matrices.at[row, absolute, tile, part, here]
                )

            def query_gradient(accumulated):
                plgpu.wgmma(accumulated, matrix[CARRIED_KEY], ref.state_key_s)
                plgpu.wgmma(accumulated, matrix[MIXED_KEY], ref.slot_key_s)
                return accumulated[...]

            result = pl.run_scoped(query_gradient, accumulator(width))
            destination = ref.query.at[tile, row, here, absolute]
            plgpu.commit_smem()  # everyone is done with the queries
            if query_dtype == dtype:
                queries[...] = result.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(queries, destination)
            else:
                destination[...] = result
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
            fetch_next_head(index)
            return rest_sum + rest, strength_sum

        zero = plgpu.layout_cast(jnp.zeros(square, jnp.float32), MATRIX)

        if not measure:

            @pl.when(exact_chunk == 1)
            def _():
                gate_out[...] = zero

        rest, strength = loop(heads_each, one_head, (zero, zero))
        if measure:
            plgpu.wait_smem_to_gmem(0)
            return
        passed = masked_sums(columns >= rows, rest)

        @pl.when(exact_chunk == 0)
        def _():
            gate_out[...] = passed

        @pl.when(exact_chunk == 1)
        def _():
            levels = plgpu.load(gate_out, layout=MATRIX, optimized=False)
            gate_out[...] = levels + passed

        strength_out[...] = strength
        plgpu.wait_smem_to_gmem(0)

    gate_shape = (batch, chunks, num_kv_heads, warpgroups, TILE, padded_slots)
    matrices = (batch, num_heads, slot_tiles, 4, length, TILE)
    if measure:
        along = (slot_tiles, batch, num_heads, length)
        outputs = {"along": jax.ShapeDtypeStruct(along, jnp.float32)}
    else:
        outputs = {
            "query": jax.ShapeDtypeStruct((slot_tiles, *slot_query.shape), query_dtype),
            "matrices": jax.ShapeDtypeStruct(matrices, dtype),
            "gate": jax.ShapeDtypeStruct(gate_shape, jnp.float32),
            "strength": jax.ShapeDtypeStruct(gate_shape, jnp.float32),
        }
    return launch(
        body,
        "nha_slot_measure" if measure else "nha_slot_gradient",
        inputs={
            "queries": slot_query,
            "slot_key": slot_key,
            "slot_value": slot_value,
            "cotangent": cotangent,
            "share": share_cotangent,
            "lse": lse,
            "delta": delta,
            "factor": factors,
            "middle": middle,
            "exact": exact,
            "state": states,
            "slot_from": plan.slot_from,
        },
        outputs=outputs,
        scratch={
            "query_s": tile_ref((warpgroups, TILE, width), dtype),
            "cotangent_s": tile_ref((warpgroups, TILE, value_width), dtype),
            "row_s": plgpu.SMEM((warpgroups, 4, TILE), jnp.float32),
            "slot_key_s": tile_ref((TILE, width), dtype),
            "slot_value_s": tile_ref((TILE, value_width), dtype),
            "state_key_s": tile_ref((TILE, width), dtype),
            "state_value_s": tile_ref((TILE, value_width), dtype),
            "factor_s": tile_ref((1 + warpgroups, *square), dtype),
            "matrix_s": tile_ref((warpgroups, 4, *square), dtype),
            "middle_s": plgpu.SMEM((TILE,), jnp.float32),
            "from_s": plgpu.SMEM((TILE,), jnp.int32),
            "arrived": plgpu.Barrier(num_arrivals=8),
            "queried": plgpu.Barrier(num_arrivals=5, num_barriers=warpgroups),
            "level_arrived": plgpu.Barrier(num_barriers=warpgroups),
        },
        grid={"chunk": chunks, "head": num_kv_heads, "tile": slot_tiles, "batch": batch},
        warpgroups=warpgroups,
    )


def slot_sums(
    slot_query: Float[Array, "B T N H"],
    cotangent: Float[Array, "B T N V"],
    matrices: Float[Array, "B N tiles four T C"],
    *,
    num_kv_heads: int,
    config: MosaicConfig,
) -> tuple[Array, Array, Array]:
    """Gradients of states and writes, summed over the heads of each group.

    A program per (chunk, kv head, tile of slots): one warpgroup sums the key side, the other the
    value side, each over the heads with the next one's loads under way.

    Roofline at shape C, T=32768: reads matrices 537 MB, queries and cotangents 537 MB, writes state
    gradients 268 MB and write gradients 134 MB: 1.5 GB, 0.35 ms at 4.2 TB/s; 8 products of
    64 x 64 x 64 a head, 69 GFLOP, 0.1 ms at 700 TFLOP/s. Bound by traffic.

    Returns:
        (state gradients [B, n, K, M, H + V] float32, slot key gradients [tiles, B, T, K, H] and
        value gradients [tiles, B, T, K, V] from the writes inside their own chunks).
    """
    batch, length, num_heads, width = slot_query.shape
    value_width = cotangent.shape[-1]
    group = num_heads // num_kv_heads
    slot_tiles = matrices.shape[2]
    dtype = slot_query.dtype
    chunks = length // TILE
    stages = min(2, group)

    def body(ref):
        names = ("chunk", "head", "tile", "batch")
        chunk, head, tile, row = (lax.axis_index(name) for name in names)
        worker = lax.axis_index("warpgroup")
        here = pl.ds(chunk * TILE, TILE)
        slots = pl.ds(tile * TILE, TILE)

        def side(worker, source, source_s, carried, mixed, state_columns, mixed_out):
            """Both sums of one side; `carried` and `mixed` are its matrices."""

            def fetch(step, stage):
                absolute = head * group + step
                barrier = ref.read.at[worker, stage]
                copy = plgpu.copy_gmem_to_smem
                own = ref.matrices.at[row, absolute, tile]
                copy(source.at[row, here, absolute], source_s.at[stage], barrier)
                copy(own.at[carried, here], ref.matrix_s.at[worker, stage, 0], barrier)
                copy(own.at[mixed, here], ref.matrix_s.at[worker, stage, 1], barrier)

            for stage in range(stages):
                fetch(stage, stage)

            def sums(carried_sum, mixed_sum):
                def one(step, _):
                    stage = remainder(step, stages)
                    plgpu.barrier_wait(ref.read.at[worker, stage])
                    matrix_s = ref.matrix_s.at[worker, stage]
                    plgpu.wgmma(carried_sum, matrix_s.at[0].T, source_s.at[stage])
                    plgpu.wgmma(mixed_sum, matrix_s.at[1].T, source_s.at[stage])
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()

                    @pl.when(step + stages < group)
                    def _fetch_next():
                        fetch(step + stages, stage)

                    return

                loop(group, one, None)
                return carried_sum[...], mixed_sum[...]

            size = source.shape[-1]
            carried_sum, mixed_sum = pl.run_scoped(sums, accumulator(size), accumulator(size))
            ref.state[row, chunk, head, slots, state_columns] = carried_sum
            source_s[0] = mixed_sum.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(source_s.at[0], mixed_out.at[tile, row, here, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(worker == 0)
        def _key_side():
            side(0, ref.query, ref.query_s, CARRIED_KEY, MIXED_KEY, pl.ds(0, width), ref.key)

        @pl.when(worker == 1)
        def _value_side():
            columns = pl.ds(width, value_width)
            side(1, ref.cotangent, ref.cotangent_s, CARRIED_VALUE, MIXED_VALUE, columns, ref.value)

    state = (batch, chunks, num_kv_heads, slot_tiles * TILE, width + value_width)
    writes = (slot_tiles, batch, length, num_kv_heads)
    results = launch(
        body,
        "nha_slot_sums",
        inputs={"query": slot_query, "cotangent": cotangent, "matrices": matrices},
        outputs={
            "state": jax.ShapeDtypeStruct(state, jnp.float32),
            "key": jax.ShapeDtypeStruct((*writes, width), dtype),
            "value": jax.ShapeDtypeStruct((*writes, value_width), dtype),
        },
        scratch={
            "query_s": tile_ref((stages, TILE, width), dtype),
            "cotangent_s": tile_ref((stages, TILE, value_width), dtype),
            "matrix_s": tile_ref((2, stages, 2, TILE, TILE), dtype),
            "read": plgpu.Barrier(num_arrivals=3, num_barriers=(2, stages)),
        },
        grid={"chunk": chunks, "head": num_kv_heads, "tile": slot_tiles, "batch": batch},
        warpgroups=2,
    )
    return results["state"], results["key"], results["value"]
