"""An initial state as history rows before the call's tokens, and the state after its last token.

Every implementation that works on whole sequences reads a state and makes one by this module.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from nha_jax.ops.inputs import OperatorInputs, result_dtypes
from nha_jax.ops.segments import SegmentLayout
from nha_jax.ops.state import NHAState


def _history(inputs: OperatorInputs) -> dict[str, Array] | None:
    """The initial state's window, oldest token first, its newest token last; zeros where none."""
    state = inputs.state
    if state is None:
        return None
    rows = state.capacity if state.window is None else state.window
    number = state.length[:, None] - rows + jnp.arange(rows, dtype=jnp.int32)[None]
    row = number % max(state.capacity, 1)

    def ordered(x):
        if x.shape[1] == 0:  # full attention keeps no slot keys and gates
            return jnp.zeros((x.shape[0], rows, *x.shape[2:]), x.dtype)
        taken = jnp.take_along_axis(x, row[:, :, None, None], axis=1)
        return jnp.where((number >= 0)[:, :, None, None], taken, 0)

    return {
        "key": ordered(state.window_key),
        "slot_key": ordered(state.window_slot_key),
        "value": ordered(state.window_value),
        "log_gate": ordered(state.window_log_gate),
    }


def with_history(inputs: OperatorInputs) -> Callable[[str, DTypeLike], Array]:
    """A function from (field of the inputs, dtype) to that array, history rows in front."""
    history = _history(inputs)

    def joined(name: str, dtype: DTypeLike) -> Array:
        x = getattr(inputs, name).astype(dtype)
        if history is None:
            return x
        return jnp.concatenate([history[name].astype(dtype), x], axis=1)

    return joined


def reads_slots(inputs: OperatorInputs) -> bool:
    """Whether any token can read a slot, as far as static facts tell."""
    if inputs.log_gate.shape[-1] == 0 or inputs.window is None:
        return False
    if isinstance(inputs.window, int) and inputs.state is None and not inputs.sink:
        return inputs.window < inputs.segment_ids.shape[1]  # else no token leaves
    return True


def poison_beyond_capacity(inputs: OperatorInputs, layout: SegmentLayout, out: Array) -> Array:
    """NaN where a full layer's state has no room: under jit nothing can be raised."""
    if inputs.window is None and inputs.state is not None:
        beyond = layout.is_token & (layout.number >= inputs.state.capacity)
        out = jnp.where(beyond[:, :, None, None], jnp.nan, out)
    return out


def initial_slots(inputs: OperatorInputs, wide: DTypeLike) -> Float[Array, "B K M HV"]:
    """Slots to start from, keys and values side by side; zeros without a state."""
    batch, _, num_kv_heads, num_slots = inputs.log_gate.shape
    if inputs.state is None:
        width = inputs.key.shape[-1] + inputs.value.shape[-1]
        return jnp.zeros((batch, num_kv_heads, num_slots, width), wide)
    state = inputs.state
    return jnp.concatenate([state.slot_key, state.slot_value], axis=-1).astype(wide)


def final_state(
    inputs: OperatorInputs,
    layout: SegmentLayout,
    joined: Callable[[str, DTypeLike], Array],
    slots: Float[Array, "B K M HV"] | None,
) -> NHAState:
    """The state after the last token, in the initial state's shapes where there is one.

    Args:
        inputs: The call's inputs, their window static.
        layout: Its segments.
        joined: From `with_history`.
        slots: Slots after the last token; None where nothing was written.
    """
    batch, length, num_kv_heads, num_slots = inputs.log_gate.shape
    window_dtype, slot_dtype = result_dtypes(inputs)
    window = inputs.window
    assert window is None or isinstance(window, int)  # no state goes with a traced one
    if inputs.state is not None:
        state = inputs.state
    else:
        state = NHAState.init(
            batch,
            num_kv_heads,
            inputs.key.shape[-1],
            inputs.value.shape[-1],
            num_slots,
            window=window,
            capacity=length if window is None else None,
            dtype=window_dtype,
        )
    if slots is None:  # full attention writes nothing
        slots = jnp.concatenate([state.slot_key, state.slot_value], axis=-1)
    width = inputs.key.shape[-1]

    rows = state.capacity
    newest = layout.final_length[:, None] - 1
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    number = newest - (newest - row) % max(rows, 1)  # of the token in each row
    held = number >= 0
    if window is not None:
        held &= number > newest - window

    def ring(name, old):
        if old.shape[1] == 0:
            return old
        x = joined(name, old.dtype)
        index = number + layout.start[:, -1:] + (x.shape[1] - length)
        taken = jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[1] - 1)[:, :, None, None], axis=1)
        return jnp.where(held[:, :, None, None], taken, 0)

    return dataclasses.replace(
        state,
        slot_key=slots[..., :width].astype(slot_dtype),
        slot_value=slots[..., width:].astype(slot_dtype),
        window_key=ring("key", state.window_key),
        window_slot_key=ring("slot_key", state.window_slot_key),
        window_value=ring("value", state.window_value),
        window_log_gate=ring("log_gate", state.window_log_gate),
        length=layout.final_length,
        segment_id=layout.final_id,
    )
