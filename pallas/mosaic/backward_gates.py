"""Gradients of what a chunk adds to the slots: slot keys, values and gates.

With dS the gradient of the slots after the chunk, w_j = s_j exp(sum of g over (j, end]) and
Z_j = k'_j.dSK + v'_j.dSV for each slot,

    dk'_j = w_j dSK + (writes read inside the chunk),  dv'_j likewise
    dg_i  = sum_{j < i} w_j Z_j + exp(G_end) S.dS + (gates passed by reads)
            - exp(g_i) (exp(sum of g over (i, end]) Z_i + (strength, by reads))

The last line is the strength s = 1 - exp(g), whose derivative is -exp(g).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas.mosaic.gates import masked_sums, split_gates, strength
from pallas.mosaic.plan import LASTING, UNWRITTEN, Plan
from pallas.mosaic.tiles import (
    BY_COLUMN,
    BY_ROW,
    GATE_FLOOR,
    TILE,
    accumulator,
    indices,
    launch,
    load,
    over_columns,
    over_rows,
    tile_ref,
)


def write_gradient(
    log_gate: Float[Array, "B Q K M"],
    slot_key: Float[Array, "B Q K H"],
    slot_value: Float[Array, "B Q K V"],
    weights: Float[Array, "B n K C M"],
    states: Float[Array, "B n K M HV"],
    state_gradients: Float[Array, "B n K M HV"],
    retained: Float[Array, "B n K M"],
    reads: dict[str, Array] | None,
    plan: Plan,
    *,
    shift: int,
) -> tuple[Array, Array, Array]:
    """Gradients of the tokens written, a chunk at a time.

    A program per (chunk, kv head, tile of `TILE` slots).

    Roofline at shape C, T=32768 (4096 programs): reads states and their gradients 268 MB, slot keys
    and values and their gradients so far 268 MB, gates and terms 268 MB, writes 201 MB: 1.0 GB,
    0.24 ms at 4.2 TB/s; 18 GFLOP, 0.03 ms at 700 TFLOP/s. Bound by traffic.

    Args:
        log_gate: Gates.
        slot_key: Slot keys.
        slot_value: Values.
        weights: w, from `gates.prepare`.
        states: Slots before each chunk.
        state_gradients: dS after each chunk, in the inputs' dtype.
        retained: exp(G_end), 0 where a segment begins in the chunk.
        reads: From `backward_slots`: "gate", "strength", and "key" and "value", the gradients of
            writes read inside the chunk; None where slots are not read.
        plan: Masks.
        shift: Tile that chunk 0 writes.

    Returns:
        Gradients of slot keys [tiles, B, T, K, H] and values [tiles, B, T, K, V], a part for each
        tile of slots, and of gates [B, T, K, M] float32; row t belongs to the token written at t.
    """
    batch, length = plan.write.shape
    chunks = length // TILE
    num_kv_heads, padded_slots = log_gate.shape[2:]
    slot_tiles = padded_slots // TILE
    key_width, value_width = slot_key.shape[-1], slot_value.shape[-1]
    dtype = slot_key.dtype
    parts_dtype = dtype if slot_tiles == 1 else jnp.float32
    workers = 0 if reads is None else reads["gate"].shape[3]
    sides = (("key", pl.ds(0, key_width)), ("value", pl.ds(key_width, value_width)))

    def body(ref):
        names = ("chunk", "head", "tile", "batch")
        chunk, head, tile, row = (lax.axis_index(name) for name in names)
        source = pl.ds(jnp.maximum(chunk + shift, 0) * TILE, TILE)
        here = pl.ds(chunk * TILE, TILE)
        slots = pl.ds(tile * TILE, TILE)
        copy = plgpu.copy_gmem_to_smem
        copy(ref.gate.at[row, source, head, slots], ref.gate_s, ref.arrived)
        copy(ref.write.at[row, here], ref.write_s, ref.arrived)
        copy(ref.weight.at[row, chunk, head, :, slots], ref.weight_s, ref.arrived)
        copy(ref.retained.at[row, chunk, head, slots], ref.retained_s, ref.arrived)
        for name, columns in sides:
            buffers = ref.buffers[name]
            copy(getattr(ref, name).at[row, source, head], buffers["written"], ref.arrived)
            state = ref.state.at[row, chunk, head, slots, columns]
            copy(state, buffers["state"], ref.arrived)
            gradient = ref.state_gradient.at[row, chunk, head, slots, columns]
            copy(gradient, buffers["state_gradient"], ref.arrived)
            if workers:
                so_far = getattr(ref, f"{name}_so_far").at[tile, row, here, head]
                copy(so_far, buffers["gradient"], ref.arrived)
        for worker in range(workers):
            terms = (row, chunk, head, worker, slice(None), slots)
            copy(ref.passed.at[terms], ref.passed_s.at[worker], ref.arrived)
            copy(ref.strength.at[terms], ref.strength_s.at[worker], ref.arrived)
        plgpu.barrier_wait(ref.arrived)

        rows, passed_by = indices()
        kind = over_rows(load(ref.write_s, BY_ROW))
        written = kind != UNWRITTEN
        gates = jnp.where(written, jnp.maximum(load(ref.gate_s), GATE_FLOOR), 0.0)
        split_gates(gates, ref.parts_s)
        to_end = jnp.exp(masked_sums(passed_by > rows, ref.parts_s, ref.mask_s))
        to_end = jnp.where(kind == LASTING, to_end, 0.0)

        def along(accumulated):
            for name, _ in sides:
                buffers = ref.buffers[name]
                plgpu.wgmma(accumulated, buffers["written"], buffers["state_gradient"].T)
            return accumulated[...]

        products = pl.run_scoped(along, accumulator(TILE))
        kept = None
        for name, _ in sides:
            buffers = ref.buffers[name]
            state = load(buffers["state"]).astype(jnp.float32)
            both = (state * load(buffers["state_gradient"]).astype(jnp.float32)).sum(axis=1)
            kept = both if kept is None else kept + both
        ref.kept_s[...] = kept
        plgpu.commit_smem()  # and everyone is done with the split gates
        split_gates(strength(gates, written) * to_end * products, ref.parts_s)
        total = masked_sums(passed_by < rows, ref.parts_s, ref.mask_s)
        kept = load(ref.kept_s, BY_COLUMN) * load(ref.retained_s, BY_COLUMN)
        total = total + over_columns(kept)
        by_strength = to_end * products
        for worker in range(workers):
            total = total + load(ref.passed_s.at[worker])
            by_strength = by_strength + load(ref.strength_s.at[worker])
        total = jnp.where(written, total - jnp.exp(gates) * by_strength, 0.0)
        ref.gate_gradient[row, here, head, slots] = total

        for name, _ in sides:
            buffers = ref.buffers[name]

            def apart(accumulated, buffers=buffers):
                plgpu.wgmma(accumulated, ref.weight_s, buffers["state_gradient"])
                return accumulated[...]

            gradient = pl.run_scoped(apart, accumulator(buffers["written"].shape[-1]))
            if workers:
                gradient = gradient + load(buffers["gradient"]).astype(jnp.float32)
            destination = getattr(ref, f"{name}_gradient").at[tile, row, here, head]
            if parts_dtype == dtype:
                buffers["gradient"][...] = gradient.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffers["gradient"], destination)
            else:
                destination[...] = gradient
        plgpu.wait_smem_to_gmem(0)

    inputs = {
        "gate": log_gate,
        "write": plan.write,
        "weight": weights,
        "retained": retained,
        "key": slot_key,
        "value": slot_value,
        "state": states,
        "state_gradient": state_gradients,
    }
    if reads is not None:
        inputs |= {
            "passed": reads["gate"],
            "strength": reads["strength"],
            "key_so_far": reads["key"],
            "value_so_far": reads["value"],
        }
    buffers = {}
    for name, width in (("key", key_width), ("value", value_width)):
        tile = tile_ref((TILE, width), dtype)
        names = ("written", "state", "state_gradient", "gradient")
        buffers[name] = dict.fromkeys(names, tile)
    square = (TILE, TILE)
    scratch = {
        "gate_s": tile_ref(square, jnp.float32),
        "parts_s": tile_ref((2, *square), jnp.bfloat16),
        "mask_s": tile_ref(square, jnp.bfloat16),
        "weight_s": tile_ref(square, dtype),
        "write_s": plgpu.SMEM((TILE,), jnp.int32),
        "retained_s": plgpu.SMEM((TILE,), jnp.float32),
        "kept_s": plgpu.SMEM((TILE,), jnp.float32),
        "buffers": buffers,
        "arrived": plgpu.Barrier(num_arrivals=10 + (2 + 2 * workers if workers else 0)),
    }
    if workers:
        scratch["passed_s"] = tile_ref((workers, *square), jnp.float32)
        scratch["strength_s"] = tile_ref((workers, *square), jnp.float32)
    rows = (slot_tiles, batch, length, num_kv_heads)
    results = launch(
        body,
        "nha_write_gradient",
        inputs=inputs,
        outputs={
            "key_gradient": jax.ShapeDtypeStruct((*rows, key_width), parts_dtype),
            "value_gradient": jax.ShapeDtypeStruct((*rows, value_width), parts_dtype),
            "gate_gradient": jax.ShapeDtypeStruct((*rows[1:], padded_slots), jnp.float32),
        },
        scratch=scratch,
        grid={"chunk": chunks, "head": num_kv_heads, "tile": slot_tiles, "batch": batch},
    )
    return results["key_gradient"], results["value_gradient"], results["gate_gradient"]
