"""What the operator refuses, in one sentence: the argument, what it was and what is valid."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nha_jax.ops.inputs import OperatorInputs, capacity_error, is_concrete
from nha_jax.ops.rotary import apply_rotary
from nha_jax.ops.segments import check_segment_ids
from nha_jax.ops.state import NHAState

_EMPTY_SLOTS = ("masked", "sink")
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
_LARGEST_ID = 2**31 - 1


def check_flags(**flags: Any) -> None:
    """Refuses anything but True and False.

    Raises:
        ValueError: it names the flag.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"{name} must be True or False, but was {flag!r}.")


def check_window_and_state(window: Any, state: Any, *, name: str, return_state: bool) -> None:
    """Refuses a window that is none, and a state that is not for it.

    Args:
        window: As the caller gave it.
        state: As the caller gave it.
        name: What the caller calls the state.
        return_state: Whether a state is asked for.

    Raises:
        ValueError: it names the argument.
    """
    static = window is None or isinstance(window, int | np.integer)
    if isinstance(window, bool) or (not static and not _is_integer_scalar(window)):
        raise ValueError(
            "window must be None (full attention), an integer >= 0 or an int32 scalar array, but "
            f"was {window!r}."
        )
    if window is not None and is_concrete(window) and np.asarray(window) < 0:
        raise ValueError(f"window must not be negative, but was {window}.")
    if static and window is not None and window > _LARGEST_ID - 1:
        raise ValueError(
            f"window must be below 2**31 - 1, but was {window}; None is full attention."
        )
    if not static and (state is not None or return_state):
        raise ValueError(
            f"window is an array, with which no state can be taken or returned: {name} and "
            "return_state need a static integer window or None."
        )
    if state is None:
        return
    if not isinstance(state, NHAState):
        raise ValueError(f"{name} must be an NHAState, but was {type(state).__name__}.")
    if state.window != window:
        raise ValueError(
            f"{name} was made for window {state.window}, but the call has window {window}."
        )


def _is_integer_scalar(x) -> bool:
    return (
        isinstance(x, jax.Array | np.ndarray)
        and x.ndim == 0
        and jnp.issubdtype(x.dtype, jnp.integer)
    )


def checked_inputs(
    query,
    key,
    value,
    log_gate,
    *,
    window,
    slot_query,
    slot_key,
    rotary,
    segment_ids,
    scale,
    empty_slots,
    state: NHAState | None,
    state_name: str,
) -> OperatorInputs:
    """Checks all arguments of a call but window and state's type, rotates, fills in defaults.

    Raises:
        ValueError: it names the argument, what was found and what is valid.
    """
    named = {"query": query, "key": key, "value": value, "log_gate": log_gate}
    named |= {"slot_query": slot_query, "slot_key": slot_key}
    for name, x in named.items():
        if x is None and name.startswith("slot_"):
            continue
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise ValueError(f"{name} must be an array, but was {type(x).__name__}.")
        if len(x.shape) != 4:
            raise ValueError(
                f"{name} must have 4 axes [B, T, heads, width], but has shape {x.shape}."
            )
        if x.dtype not in _FLOATS:
            raise ValueError(
                f"{name} must be bfloat16, float16, float32 or float64, but was {x.dtype}."
            )
    batch, length, num_heads, key_width = query.shape
    num_kv_heads, num_slots = key.shape[2], log_gate.shape[3]
    if min(batch, length, num_heads, key_width, num_kv_heads, value.shape[3]) < 1:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} must have no empty axis."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query must have a multiple of the {num_kv_heads} key/value heads, but has "
            f"{num_heads} heads (query {query.shape}, key {key.shape})."
        )
    expected = {
        "key": (batch, length, num_kv_heads, key_width),
        "value": (batch, length, num_kv_heads, value.shape[3]),
        "log_gate": (batch, length, num_kv_heads, num_slots),
        "slot_query": query.shape,
        "slot_key": (batch, length, num_kv_heads, key_width),
    }
    for name, shape in expected.items():
        x = named[name]
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} beside query {query.shape}, but has {x.shape}."
            )
        if name != "log_gate" and x.dtype != query.dtype:
            raise ValueError(
                f"{name} must have the dtype of query, {query.dtype}, but is {x.dtype}."
            )
    if empty_slots not in _EMPTY_SLOTS:
        raise ValueError(f"empty_slots must be 'masked' or 'sink', but was {empty_slots!r}.")
    if scale is None:
        scale = key_width**-0.5
    elif isinstance(scale, bool | str) or not (
        isinstance(scale, int | float | np.number)
        or (isinstance(scale, jax.Array | np.ndarray) and scale.ndim == 0)
    ):
        raise ValueError(f"scale must be a number or None, but was {scale!r}.")
    elif is_concrete(scale) and not np.isfinite(np.asarray(scale, np.float64)):
        raise ValueError(f"scale must be finite, but was {scale}.")
    query, key, value, log_gate = map(jnp.asarray, (query, key, value, log_gate))
    slot_query = query if slot_query is None else jnp.asarray(slot_query)
    slot_key = key if slot_key is None else jnp.asarray(slot_key)
    if rotary is not None:
        cos, sin = _checked_rotary(rotary, batch, length, key_width)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
    if state is not None:
        _check_state(state, state_name, batch, num_kv_heads, key_width, value.shape[3], num_slots)
    has_padding = segment_ids is not None
    segment_ids = _checked_segment_ids(segment_ids, batch, length, state)
    if has_padding:
        # What padding holds, NaN included, must not reach a product with a zero weight.
        is_token = (segment_ids > 0)[:, :, None, None]
        query, key, value, log_gate, slot_query, slot_key = (
            jnp.where(is_token, x, 0) for x in (query, key, value, log_gate, slot_query, slot_key)
        )
    # NumPy, because inside jit even an operation on a constant gives no value to look at.
    if is_concrete(log_gate) and log_gate.size and (highest := np.asarray(log_gate).max()) > 0:
        raise ValueError(
            f"log_gate must be <= 0 (the logarithm of a retention), but has {highest}."
        )
    if state is not None and window is None:
        _check_capacity(state, segment_ids)
    if isinstance(window, np.integer):
        window = int(window)
    elif window is not None and not isinstance(window, int):
        window = jnp.asarray(window, jnp.int32)
    return OperatorInputs(
        query=query,
        key=key,
        value=value,
        log_gate=log_gate,
        slot_query=slot_query,
        slot_key=slot_key,
        segment_ids=segment_ids,
        window=window,
        scale=scale,
        sink=empty_slots == "sink",
        state=state,
    )


def _checked_rotary(rotary, batch: int, length: int, key_width: int):
    if key_width % 2:
        raise ValueError(f"rotary needs an even key width, but query has width {key_width}.")
    is_pair = isinstance(rotary, tuple | list) and len(rotary) == 2
    if not is_pair or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in rotary):
        raise ValueError(f"rotary must be a pair (cos, sin) of arrays, but was {rotary!r}.")
    cos, sin = rotary
    if cos.shape != sin.shape:
        raise ValueError(
            f"rotary: cos and sin must have one shape, but have {cos.shape} and {sin.shape}."
        )
    valid = ((length, key_width // 2), (batch, length, key_width // 2))
    for name, x in (("cos", cos), ("sin", sin)):
        if jnp.shape(x) not in valid:
            raise ValueError(
                f"rotary: {name} must have shape {valid[0]} or {valid[1]}, but has {jnp.shape(x)}."
            )
        if jnp.asarray(x).dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"rotary: {name} must be float32 (16-bit angles alias), but was {x.dtype}."
            )
    return jnp.asarray(cos), jnp.asarray(sin)


def _checked_segment_ids(segment_ids, batch: int, length: int, state: NHAState | None) -> Array:
    if segment_ids is None:
        if state is None:
            return jnp.ones((batch, length), jnp.int32)
        going_on = jnp.maximum(state.segment_id, 1)  # the call continues the state's segment
        return jnp.broadcast_to(going_on[:, None], (batch, length))
    if not hasattr(segment_ids, "dtype") or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        found = getattr(segment_ids, "dtype", type(segment_ids).__name__)
        raise ValueError(f"segment_ids must be an integer array, but was {found}.")
    if segment_ids.shape != (batch, length):
        raise ValueError(
            f"segment_ids must have shape {(batch, length)}, but has {segment_ids.shape}."
        )
    if is_concrete(segment_ids):
        if (highest := np.max(np.asarray(segment_ids))) > _LARGEST_ID:
            raise ValueError(
                f"segment_ids must be at most {_LARGEST_ID} (int32), but has {highest}."
            )
        check_segment_ids(np.asarray(segment_ids), has_initial_state=state is not None)
    return jnp.asarray(segment_ids, jnp.int32)


def _check_state(state, name, batch, num_kv_heads, key_width, value_width, num_slots) -> None:
    """Refuses a state whose arrays are not those of this call, or whose counters are impossible."""
    for field in ("window_key", "length", "segment_id"):
        if not hasattr(getattr(state, field), "shape"):
            raise ValueError(
                f"{name}: {field} must be an array, but was {type(getattr(state, field)).__name__}."
            )
    capacity = state.capacity
    leaving = 0 if state.window is None else capacity
    expected = {
        "slot_key": (batch, num_kv_heads, num_slots, key_width),
        "slot_value": (batch, num_kv_heads, num_slots, value_width),
        "window_key": (batch, capacity, num_kv_heads, key_width),
        "window_slot_key": (batch, leaving, num_kv_heads, key_width),
        "window_value": (batch, capacity, num_kv_heads, value_width),
        "window_log_gate": (batch, leaving, num_kv_heads, num_slots),
        "length": (batch,),
        "segment_id": (batch,),
    }
    wide = ("slot_key", "slot_value", "window_log_gate")
    for field, shape in expected.items():
        x = getattr(state, field)
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(f"{name}: {field} must be an array, but was {type(x).__name__}.")
        if x.shape != shape:
            raise ValueError(f"{name}: {field} must have shape {shape} here, but has {x.shape}.")
        valid: tuple[Any, ...] = _FLOATS
        if field in ("length", "segment_id"):
            valid = (jnp.int32,)
        elif field in wide:
            valid = (jnp.float32, jnp.float64)
        if x.dtype not in valid:
            names = " or ".join(jnp.dtype(each).name for each in valid)
            raise ValueError(f"{name}: {field} must be {names}, but was {x.dtype}.")
    if state.window is not None and capacity < state.window:
        raise ValueError(
            f"{name}: window_key has {capacity} rows, fewer than the window of {state.window} "
            "tokens."
        )
    if is_concrete(state.length) and is_concrete(state.segment_id):
        length, segment_id = np.asarray(state.length), np.asarray(state.segment_id)
        if length.min() < 0 or segment_id.min() < 0 or np.any((length > 0) & (segment_id == 0)):
            raise ValueError(
                f"{name}: length and segment_id must not be negative, and a length above 0 needs "
                f"a segment_id, but they are {length.tolist()} and {segment_id.tolist()}."
            )


def _check_capacity(state: NHAState, segment_ids: Array) -> None:
    if not (
        is_concrete(state.length) and is_concrete(state.segment_id) and is_concrete(segment_ids)
    ):
        return
    rows = zip(*map(np.asarray, (segment_ids, state.segment_id, state.length)), strict=True)
    longest = np.array([_longest(*row) for row in rows])
    if longest.max() > state.capacity:
        raise capacity_error(longest, state.capacity)


def _longest(ids: np.ndarray, segment_id, seen) -> int:
    """The most tokens any segment of a row comes to hold, the state's included."""
    current, count, longest = int(segment_id), int(seen), int(seen)
    for token_id in ids:
        if token_id > 0:
            count = count + 1 if token_id == current else 1
            current, longest = token_id, max(longest, count)
    return longest
