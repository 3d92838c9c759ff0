"""The `xla` implementation: the chunked form of DESIGN section 2 in plain JAX.

Linear time and memory in T, differentiable, any shape, any backend.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nha_jax.ops.gates import write_strength
from nha_jax.ops.history import (
    final_state,
    initial_slots,
    poison_beyond_capacity,
    reads_slots,
    with_history,
)
from nha_jax.ops.inputs import OperatorInputs
from nha_jax.ops.segments import SegmentLayout, segment_layout
from nha_jax.ops.slot_memory import Chunks, chunk_states, read_slots
from nha_jax.ops.state import NHAState
from nha_jax.ops.window_attention import EMPTY_LSE, windowed_attention

_CHUNK = 32
# Elements of intra-chunk factors that may live at once, as in `window_attention`.
_READ_BUDGET = 1 << 22


def run(
    inputs: OperatorInputs, *, return_state: bool = True
) -> tuple[Float[Array, "B T N V"], NHAState | None, Float[Array, "B T N"]]:
    """Runs the operator on chunks of tokens.

    Returns:
        (output, state after the last token, slot share). The state is None where it was not
        asked for or the window is traced.
    """
    length = inputs.segment_ids.shape[1]
    layout = segment_layout(inputs.segment_ids, inputs.state)
    wide = inputs.accumulator_dtype
    window: Any = inputs.window
    full: Any = inputs.window is None
    if not inputs.window_is_static:
        full = window >= length
        window = jnp.clip(window, 0, length)
    elif inputs.state is None:
        # Nothing is older than the call: a wider window holds the same tokens.
        window = length if window is None else min(window, length)

    joined = with_history(inputs)
    window_out, window_lse = _read_window(inputs, layout, window, joined, wide)
    slots = chunks = before = None
    reads = reads_slots(inputs)
    if reads or (inputs.window is not None and return_state):
        chunks = _shifted_chunks(inputs, layout, window, joined, wide)
        before, slots = chunk_states(chunks, initial_slots(inputs, wide), inputs.precision)
    if reads and chunks is not None:
        readable = layout.is_token & (inputs.sink | (layout.number >= window))
        readable &= jnp.logical_not(full)
        out, slot_share = _read_both(inputs, chunks, before, readable, window_out, window_lse)
    else:
        out, slot_share = window_out, jnp.zeros(window_lse.shape, wide)

    out = poison_beyond_capacity(inputs, layout, out)
    state = None
    if return_state and inputs.window_is_static:
        state = final_state(inputs, layout, joined, slots)
    return out.astype(inputs.value.dtype), state, slot_share


def _read_window(inputs, layout: SegmentLayout, window, joined, wide):
    """The window's own softmax: (output [B, T, N, V], log-sum-exp [B, T, N])."""
    batch, length, num_heads, _ = inputs.query.shape
    if isinstance(window, int) and window == 0:
        out = jnp.zeros((batch, length, num_heads, inputs.value.shape[-1]), wide)
        return out, jnp.full((batch, length, num_heads), EMPTY_LSE, wide)
    reach = layout.number
    far: int | Array
    if window is None:  # full attention from a state: only the rows that are filled cost
        far = jnp.max(layout.number)
    else:
        reach = jnp.minimum(reach, window - 1)
        far = window - 1
        if isinstance(far, int) and inputs.state is None:
            far = min(far, length - 1)
    reach = jnp.where(layout.is_token, reach, -1)
    query = inputs.query.astype(wide) * inputs.scale
    return windowed_attention(
        query,
        joined("key", wide),
        joined("value", wide),
        reach,
        far=far,
        precision=inputs.precision,
    )


def _shifted_chunks(inputs, layout: SegmentLayout, window, joined, wide) -> Chunks:
    """The sequences as the slots see them: position t holds the token that leaves at time t."""
    batch, length = inputs.segment_ids.shape
    size = min(_CHUNK, 1 << (length - 1).bit_length())
    count = -(-length // size)
    end = count * size - length

    def shifted(name):
        x = joined(name, wide)
        if inputs.state is None:  # with a state the history already stands in front
            before = window if isinstance(window, int) else length
            x = jnp.pad(x, ((0, 0), (before, 0), (0, 0), (0, 0)))
        first = 0 if isinstance(window, int) else length - window
        x = jax.lax.dynamic_slice_in_dim(x, first, length, axis=1)
        x = jnp.pad(x, ((0, 0), (0, end), (0, 0), (0, 0)))
        return x.reshape(batch, count, size, *x.shape[2:]).transpose(0, 1, 3, 2, 4)

    written = layout.is_token & (layout.number >= window)
    written = jnp.pad(written, ((0, 0), (0, end))).reshape(batch, count, 1, size, 1)
    start = jnp.pad(layout.start, ((0, 0), (0, end)), mode="edge").reshape(batch, count, size)
    log_gate = jnp.where(written, shifted("log_gate"), 0)
    return Chunks(
        key_value=jnp.concatenate([shifted("slot_key"), shifted("value")], axis=-1),
        log_gate=log_gate,
        strength=write_strength(log_gate),
        start=start,
        chunk_start=jnp.arange(count, dtype=jnp.int32) * size,
    )


def _read_both(inputs, chunks: Chunks, before, readable, window_out, window_lse):
    """Joins the slots to the window's softmax, a group of chunks at a time."""
    batch, length, num_heads, _ = inputs.slot_query.shape
    num_kv_heads, num_slots = inputs.log_gate.shape[2:]
    wide = window_out.dtype
    count, size = chunks.start.shape[1:]
    cost = batch * num_heads * size * (size + num_slots)
    group = max(1, min(count, _READ_BUDGET // cost))
    groups = -(-count // group)
    padded = groups * group

    def grouped(x, fill=0):  # [B, n, ...] -> [groups, B, group, ...]
        x = jnp.pad(
            x, [(0, 0), (0, padded - count)] + [(0, 0)] * (x.ndim - 2), constant_values=fill
        )
        return jnp.moveaxis(x.reshape(batch, groups, group, *x.shape[2:]), 1, 0)

    def by_head(x):  # [B, T, N, w] -> [B, n, K, G, C, w]
        x = jnp.pad(x, ((0, 0), (0, count * size - length), (0, 0), (0, 0)))
        x = x.reshape(batch, count, size, num_kv_heads, -1, x.shape[-1])
        return x.transpose(0, 1, 3, 4, 2, 5)

    query = inputs.slot_query.astype(wide) * inputs.scale
    readable = jnp.pad(readable, ((0, 0), (0, count * size - length)))
    chunk_start = jnp.pad(chunks.chunk_start, (0, padded - count)).reshape(groups, group)
    xs = (
        grouped(by_head(query)),
        Chunks(
            grouped(chunks.key_value),
            grouped(chunks.log_gate),
            grouped(chunks.strength),
            grouped(chunks.start),
            chunk_start,
        ),
        grouped(before),
        grouped(readable.reshape(batch, count, size)),
        grouped(by_head(window_out)),
        grouped(by_head(window_lse[..., None])[..., 0], fill=EMPTY_LSE),
    )

    @jax.checkpoint  # the factors inside a chunk are cheaper to compute again than to keep
    def read(xs):
        query, chunks, slots, readable, window_out, window_lse = xs
        return read_slots(query, chunks, slots, readable, window_out, window_lse, inputs.precision)

    if groups == 1:
        out, slot_share = (y[None] for y in read(jax.tree.map(lambda x: x[0], xs)))
    else:
        out, slot_share = jax.lax.map(read, xs)

    def by_token(x):  # [groups, B, group, K, G, C, w] -> [B, T, N, w]
        x = jnp.moveaxis(x, 0, 1).reshape(batch, padded, *x.shape[3:])
        x = x.transpose(0, 1, 4, 2, 3, 5).reshape(batch, padded * size, num_heads, x.shape[-1])
        return x[:, :length]

    return by_token(out), by_token(slot_share[..., None])[..., 0]
