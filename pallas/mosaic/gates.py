"""Decay factors of a chunk, and what the chunk adds to the slots.

Let g be the log gates of the tokens written in a chunk (shifted: position t holds the token that
leaves the window at time t), s = 1 - exp(g), and D[t, j] = exp(sum of g over (j, t]). Readers need

    sum_j D[t, j, m] s_j[m] A[t, j]       for a matrix A of products, and its transposes.

D is never formed. It is a sum over *levels* of products of a reader's and a writer's factor:

    one reference (level 0, j <= t):  D s = exp(G_t - R) * exp(R - G_j) s_j, R half the chunk's sum
    exact:  level of half h, where j lies left and t right of the middle of a block of 2h:
                D s = exp(sum over [middle, t]) * exp(sum over (j, middle)) s_j
            for h = 32, 16, .., 1, and s_j itself for j = t

t ^ j has its highest bit at h exactly for the pairs of the level of half h, which is how kernels
make the masks. Every exponent of the exact form is a sum of gates that are really passed: it is
never positive and never a difference. The one-reference form is one product instead of seven but
leaves the range of the dtype for closed gates; `is_exact` says for each chunk and kv head which
form its factors have.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas.mosaic.plan import LASTING, UNWRITTEN, Plan
from pallas.mosaic.tiles import (
    BY_COLUMN,
    BY_ROW,
    GATE_FLOOR,
    ONE_REFERENCE_LIMIT,
    TILE,
    accumulator,
    indices,
    launch,
    load,
    loop,
    over_columns,
    over_rows,
    tile_ref,
)

HALVES = (32, 16, 8, 4, 2, 1)
# Places of the factors in the array of `prepare`. An exact chunk has its levels from LEVELS on, the
# level j = t last; the inverse-strength factors, the writer's without s, are for the backward pass.
FROM_START, WRITER, LEVELS = 0, 1, 2
FORWARD_FACTORS = 9
WRITER_BARE, LEVELS_BARE = 9, 10
BACKWARD_FACTORS = 16


def level_bounds(level, exact) -> tuple[jax.Array, jax.Array]:
    """Bounds (low, high) of t ^ j for the pairs of a level; `exact` is 0 or 1, both scalars."""
    half = lax.shift_right_logical(jnp.int32(HALVES[0]), level)
    low = exact * half
    high = exact * jnp.maximum(2 * half, 1) + (1 - exact) * TILE
    return low, high


def level_mask(rows, columns, level, exact) -> jax.Array:
    """Pairs (reader t in rows, writer j in columns) of a level."""
    low, high = level_bounds(level, exact)
    apart = rows ^ columns
    return (apart >= low) & (apart < high) & (rows >= columns)


def chunk_sums(
    log_gate: Float[Array, "B T K M"], plan: Plan, *, shift: int
) -> Float[Array, "B n K M"]:
    """Sums of the gates written in each chunk. One pass over the gates, left to XLA to fuse.

    `shift` is the tile of `log_gate` that chunk 0 writes; tiles before the array are not written.
    """
    batch, length = plan.write.shape
    chunks = length // TILE
    tile = jnp.maximum(jnp.arange(chunks) + shift, 0)
    tiles = log_gate.reshape(batch, -1, TILE, *log_gate.shape[2:])
    tiles = jnp.take(tiles, tile, axis=1) if shift else tiles[:, :chunks]
    written = (plan.write != UNWRITTEN).reshape(batch, chunks, TILE, 1, 1)
    return jnp.sum(jnp.where(written, jnp.maximum(tiles, GATE_FLOOR), 0), axis=2)


def is_exact(sums: Float[Array, "B n K M"], dtype) -> Int[Array, "B n K"]:
    """1 where a chunk's gates need the exact form, else 0."""
    limit = ONE_REFERENCE_LIMIT[jnp.dtype(dtype)]
    return (jnp.min(sums, axis=-1) < limit).astype(jnp.int32)


def reference(sums, exact) -> jax.Array:
    """R of the one-reference form; 0 for exact chunks, whose factors have none."""
    return jnp.where(exact[..., None] == 1, 0, sums / 2)


def strength(log_gate, written) -> jax.Array:
    """1 - exp(g), accurate near 0 (the kernels have no expm1); 0 where nothing is written."""
    series = log_gate * (1 / 6 + log_gate * (1 / 24 + log_gate * (1 / 120)))
    series = log_gate * (1 + log_gate * (0.5 + series))
    # Below -1/8 the difference keeps all but 3 bits, above it the series is exact to 1e-8.
    value = -jnp.where(log_gate > -0.125, series, jnp.exp(log_gate) - 1)
    return jnp.where(written, value, 0.0)


def split_gates(log_gate, parts) -> None:
    """Writes gates to shared memory as the sum of two bfloat16 tiles, to be summed by products."""
    high = log_gate.astype(jnp.bfloat16)
    parts[0] = high
    parts[1] = (log_gate - high.astype(jnp.float32)).astype(jnp.bfloat16)
    plgpu.commit_smem()


def masked_sums(mask, parts, left) -> jax.Array:
    """Sums of rows of a split tile, one for each row of a mask [TILE, TILE].

    The mask goes through the shared-memory tile `left`: from registers, two products under way at
    once, the sums were wrong on an H200 in some compilations of `prepare` (JAX 0.11.2).
    """
    plgpu.commit_smem()  # everyone is done with the mask before
    left[...] = jnp.where(mask, jnp.float32(1), jnp.float32(0)).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def run(accumulated):
        plgpu.wgmma(accumulated, left, parts.at[0])
        plgpu.wgmma(accumulated, left, parts.at[1])
        return accumulated[...]

    return pl.run_scoped(run, accumulator(parts.shape[-1]))


def prepare(
    log_gate: Float[Array, "B T K M"],
    slot_key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    plan: Plan,
    middle: Float[Array, "B n K M"],
    exact: Int[Array, "B n K"],
    *,
    shift: int,
    backward: bool,
) -> dict[str, Array]:
    """Factors and contributions of all chunks.

    A program per (chunk, kv head): loads gates, slot keys and values of the tokens written, once.

    Roofline at shape C, T=32768 (4096 programs): reads 16 KiB of gates and 32 KiB of slot keys and
    values, writes 24 KiB of factors and 64 KiB of contributions: 0.56 GB, 0.13 ms at 4.2 TB/s; 4
    products of gates and 2 of contributions, 9 GFLOP, 0.01 ms at 700 TFLOP/s. Bound by traffic.

    Args:
        log_gate: Gates, float32; M a multiple of `TILE`.
        slot_key: Slot keys.
        value: Values.
        plan: Masks.
        middle: R of each chunk.
        exact: Which chunks are in the exact form.
        shift: Tile that chunk 0 writes.
        backward: Whether to write the factors without strength too and leave contributions out.

    Returns:
        "factor" [B, n, K, places, TILE, M], "weight" [B, n, K, TILE, M] that a write has at the
        chunk's end, and, unless `backward`, "added" [B, n, K, M, H + V] float32: what the chunk
        adds to the slots. Factors of levels are written for exact chunks only.
    """
    batch, length = plan.write.shape
    chunks = length // TILE
    num_kv_heads, num_slots = log_gate.shape[2:]
    key_width, value_width = slot_key.shape[-1], value.shape[-1]
    dtype = slot_key.dtype
    places = BACKWARD_FACTORS if backward else FORWARD_FACTORS
    shape = (TILE, num_slots)

    def body(ref):
        chunk, head, row = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        source = pl.ds(jnp.maximum(chunk + shift, 0) * TILE, TILE)
        here = pl.ds(chunk * TILE, TILE)
        plgpu.copy_gmem_to_smem(ref.gate.at[row, source, head], ref.gate_s, ref.arrived)
        plgpu.copy_gmem_to_smem(ref.write.at[row, here], ref.write_s, ref.arrived)
        plgpu.copy_gmem_to_smem(ref.middle.at[row, chunk, head], ref.middle_s, ref.arrived)
        if not backward:
            plgpu.copy_gmem_to_smem(ref.key.at[row, source, head], ref.key_s, ref.arrived)
            plgpu.copy_gmem_to_smem(ref.value.at[row, source, head], ref.value_s, ref.arrived)
        is_exact_chunk = ref.exact[row, chunk, head]
        plgpu.barrier_wait(ref.arrived)

        kind = over_rows(load(ref.write_s, BY_ROW), shape)
        written = kind != UNWRITTEN
        gates = jnp.where(written, jnp.maximum(load(ref.gate_s), GATE_FLOOR), 0.0)
        split_gates(gates, ref.parts_s)
        strengths = strength(gates, written)
        reader, passed = indices()

        def put(place, factor):
            """One factor to global memory, through the buffer that the last store has left."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            ref.out_s[...] = factor.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(ref.out_s, ref.factor.at[row, chunk, head, place])

        bare = jnp.exp(masked_sums(passed > reader, ref.parts_s, ref.mask_s))
        bare = jnp.where(kind == LASTING, bare, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ref.out_s[...] = (strengths * bare).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref.out_s, ref.weight.at[row, chunk, head])
        if not backward:
            columns = 0
            for tile in (ref.key_s, ref.value_s):

                def run(accumulated, tile=tile):
                    plgpu.wgmma(accumulated, ref.out_s.T, tile)
                    return accumulated[...]

                width = tile.shape[-1]
                added = pl.run_scoped(run, accumulator(width, num_slots))
                ref.added[row, chunk, head, :, pl.ds(columns, width)] = added
                columns += width

        sums = masked_sums(passed <= reader, ref.parts_s, ref.mask_s)
        sums = sums - over_columns(load(ref.middle_s, BY_COLUMN), shape)
        put(FROM_START, jnp.exp(sums))

        @pl.when(is_exact_chunk == 0)
        def _():
            inverse = jnp.exp(-sums)
            put(WRITER, strengths * inverse)
            if backward:
                put(WRITER_BARE, inverse)

        @pl.when(is_exact_chunk == 1)
        def _():
            rows, _ = indices(shape)

            def level(index, _):
                half = lax.shift_right_logical(jnp.int32(HALVES[0]), index)
                inside = (reader ^ passed) < half
                right = ((reader & half) != 0) & (passed <= reader)
                mask = inside & (right | (((reader & half) == 0) & (passed > reader)))
                factor = jnp.exp(masked_sums(mask, ref.parts_s, ref.mask_s))
                put(LEVELS + index, jnp.where((rows & half) != 0, factor, factor * strengths))
                if backward:
                    put(LEVELS_BARE + index, factor)
                return

            loop(len(HALVES), level, None)
            put(LEVELS + len(HALVES), strengths)

        plgpu.wait_smem_to_gmem(0)

    inputs = {
        "gate": log_gate,
        "key": slot_key,
        "value": value,
        "write": plan.write,
        "middle": middle,
        "exact": exact,
    }
    outputs = {
        "factor": jax.ShapeDtypeStruct((batch, chunks, num_kv_heads, places, *shape), dtype),
        "weight": jax.ShapeDtypeStruct((batch, chunks, num_kv_heads, *shape), dtype),
    }
    scratch = {
        "gate_s": tile_ref(shape, jnp.float32),
        "parts_s": tile_ref((2, *shape), jnp.bfloat16),
        "write_s": plgpu.SMEM((TILE,), jnp.int32),
        "middle_s": plgpu.SMEM((num_slots,), jnp.float32),
        "out_s": tile_ref(shape, dtype),
        "mask_s": tile_ref((TILE, TILE), jnp.bfloat16),
        "arrived": plgpu.Barrier(num_arrivals=3 if backward else 5),
    }
    if not backward:
        width = key_width + value_width
        added = (batch, chunks, num_kv_heads, num_slots, width)
        outputs["added"] = jax.ShapeDtypeStruct(added, jnp.float32)
        scratch["key_s"] = tile_ref((TILE, key_width), dtype)
        scratch["value_s"] = tile_ref((TILE, value_width), dtype)
    return launch(
        body,
        "nha_prepare",
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        grid={"chunk": chunks, "head": num_kv_heads, "batch": batch},
    )
