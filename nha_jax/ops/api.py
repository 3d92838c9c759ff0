"""The operator's public functions: what they take, what they refuse, which implementation runs."""

import functools
import importlib.util
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nha_jax.ops import chunked, reference, step
from nha_jax.ops.inputs import OperatorInputs, capacity_error, is_concrete
from nha_jax.ops.rotary import apply_rotary
from nha_jax.ops.segments import check_segment_ids
from nha_jax.ops.state import NHAState

_logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "xla", "pallas", "triton")
_EMPTY_SLOTS = ("masked", "sink")
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def native_hybrid_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_gate: Float[Array, "B T K M"],
    *,
    window: int | None | Int[Array, ""],
    slot_query: Float[Array, "B T N H"] | None = None,
    slot_key: Float[Array, "B T K H"] | None = None,
    rotary: tuple[Float[Array, "*B T H/2"], Float[Array, "*B T H/2"]] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    empty_slots: str = "masked",
    initial_state: NHAState | None = None,
    return_state: bool = False,
    return_slot_share: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attends to M memory slots and a window of W exact tokens with one softmax.

    Token t sees the tokens t-W+1 .. t exactly. The token that leaves the window, e = t-W, is
    written to the slots of its key/value head,

        SK[m] <- exp(g_e[m]) SK[m] + (1 - exp(g_e[m])) slot_key_e,   SV likewise with value_e,

    and one softmax runs over `scale * slot_query_t . SK[m]` and `scale * query_t . key_j`
    (arXiv 2510.07019, section 3). `window=0` is Gated Slot Attention, `window=None` causal
    softmax attention, M = 0 sliding-window attention.

    Args:
        query: [B, T, N, H] before rotation; N = G*K, the G heads of a group contiguous. bfloat16,
            float16, float32 or float64; state, gate sums and softmax are float32 (float64 for
            float64).
        key: [B, T, K, H] before rotation, dtype of `query`.
        value: [B, T, K, V], dtype of `query`.
        log_gate: [B, T, K, M], natural log of the retention, finite and <= 0, any float dtype.
        window: W >= 0 in tokens, the token itself included; None for full attention; or a traced
            int32 scalar, with which one compilation serves all windows (a value >= T is full
            attention; no state is taken or returned then).
        slot_query: [B, T, N, H], default `query` before rotation.
        slot_key: [B, T, K, H], default `key` before rotation.
        rotary: (cos, sin), each [T, H/2] or [B, T, H/2]; row t rotates token t, on the window path
            only, first half of the width paired with the second.
        segment_ids: [B, T] integers; ids from 1, 0 = padding. A segment is an unbroken run of its
            id; a token sees its own segment only. Padding may stand before, between and after
            segments (with `initial_state` only after) and comes out as 0.
        scale: Factor on all logits; None is H**-0.5.
        empty_slots: "masked": slots take part only once a token of the segment has left the window.
            "sink": empty slots take part as zero keys and zero values.
        initial_state: Where to go on from; made for the same `window`. Never changed in place.
        return_state: Whether to return the state after the last token.
        return_slot_share: Whether to return the softmax mass on the slots.
        implementation: "reference", "xla", "pallas", "triton", or None for the best available.

    Returns:
        out [B, T, N, V] in the dtype of `value`. With `return_state` and/or `return_slot_share` a
        tuple (out, state, slot_share) of what was asked for, in this order; slot_share is [B, T, N]
        in float32 (float64 for float64 inputs).

    Raises:
        ValueError: for a wrong shape, dtype, window, id or state; it names the argument, what was
            found and what is valid. What only concrete values show (ids, a full state) is refused
            where values are concrete; under `jit` a full layer past its capacity gives NaN.
        NotImplementedError: if a named implementation cannot do the job; it says why.
    """
    _check_state_and_window(window, initial_state, return_state)
    inputs = _checked(
        query,
        key,
        value,
        log_gate,
        window=window,
        slot_query=slot_query,
        slot_key=slot_key,
        rotary=rotary,
        segment_ids=segment_ids,
        scale=scale,
        empty_slots=empty_slots,
        state=initial_state,
    )
    state: NHAState | None
    if _resolve(implementation) == "reference":
        out, state, slot_share = reference.run(inputs)
    else:
        out, state, slot_share = chunked.run(inputs, return_state=return_state)
    extras = [state] * return_state + [slot_share] * return_slot_share
    return (out, *extras) if extras else out


def native_hybrid_attention_step(
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "B 1 K H"],
    value: Float[Array, "B 1 K V"],
    log_gate: Float[Array, "B 1 K M"],
    state: NHAState,
    *,
    window: int | None,
    slot_query: Float[Array, "B 1 N H"] | None = None,
    slot_key: Float[Array, "B 1 K H"] | None = None,
    rotary: tuple[Float[Array, "*B 1 H/2"], Float[Array, "*B 1 H/2"]] | None = None,
    segment_ids: Int[Array, "B 1"] | None = None,
    scale: float | None = None,
    empty_slots: str = "masked",
    return_slot_share: bool = False,
    implementation: str | None = None,
) -> Any:
    """Decodes one token: the operator with T = 1, from a state to the next.

    The state's ring buffer is read where it lies: no history is copied. All arguments are as in
    `native_hybrid_attention`, with a time axis of 1 and a static window, the state's own.

    Returns:
        (out [B, 1, N, V], state), or (out, state, slot_share [B, 1, N]) with `return_slot_share`.

    Raises:
        ValueError: as `native_hybrid_attention`, and for a time axis that is not 1.
        NotImplementedError: if a named implementation cannot do the job.
    """
    if not isinstance(state, NHAState):
        raise ValueError(f"state must be an NHAState, but was {type(state).__name__}.")
    if jnp.ndim(query) == 4 and jnp.shape(query)[1] != 1:
        raise ValueError(
            "native_hybrid_attention_step takes one token, a time axis of 1, but query has shape "
            f"{jnp.shape(query)}; use native_hybrid_attention for more."
        )
    _check_state_and_window(window, state, True)
    inputs = _checked(
        query,
        key,
        value,
        log_gate,
        window=window,
        slot_query=slot_query,
        slot_key=slot_key,
        rotary=rotary,
        segment_ids=segment_ids,
        scale=scale,
        empty_slots=empty_slots,
        state=state,
    )
    _resolve(implementation)  # one token is the same program in "reference" and "xla"
    out, new_state, slot_share = step.run(inputs)
    return (out, new_state, slot_share) if return_slot_share else (out, new_state)


class Availability(NamedTuple):
    """One implementation of the operator, as `explain_choice` reports it."""

    name: str
    available: bool
    reason: str


def explain_choice() -> tuple[str, list[Availability]]:
    """The implementation that `implementation=None` takes on the default device, and why.

    Returns:
        (name of the chosen one, all implementations with the reason each can or cannot run).
    """
    platform = jax.default_backend()
    found = [
        Availability("reference", True, "one token at a time; for checking, not for speed"),
        Availability(
            "xla", True, f"chunked form in plain JAX; runs on any backend, here {platform}"
        ),
    ]
    for name in ("pallas", "triton"):
        found.append(Availability(name, False, _missing_kernels(name)))
    return "xla", found


def _missing_kernels(name: str) -> str:
    if importlib.util.find_spec("pallas") is None:
        return "the package `pallas` with the GPU kernels is not installed"
    return f"this version has no {name} kernels yet"


@functools.cache
def _log_choice(name: str) -> None:
    _logger.info("native_hybrid_attention: implementation %r on %s", name, jax.default_backend())


def _resolve(implementation: str | None) -> str:
    if implementation is None:
        name, _ = explain_choice()
        _log_choice(name)
        return name
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}, but "
            f"was {implementation!r}."
        )
    if implementation in ("pallas", "triton"):
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run: {_missing_kernels(implementation)}; "
            "use 'xla', or None for the best available."
        )
    return implementation


def _check_state_and_window(window, state: NHAState | None, return_state: bool) -> None:
    static = window is None or isinstance(window, int | np.integer)
    if isinstance(window, bool) or (not static and not _is_integer_scalar(window)):
        raise ValueError(
            "window must be None (full attention), an integer >= 0 or an int32 scalar array, but "
            f"was {window!r}."
        )
    if static and window is not None and window < 0:
        raise ValueError(f"window must not be negative, but was {window}.")
    if static and window is not None and window >= 2**31 - 1:
        raise ValueError(
            f"window must be below 2**31 - 1, but was {window}; None is full attention."
        )
    if not static and (state is not None or return_state):
        raise ValueError(
            "A window that is an array has no state: initial_state and return_state need a static "
            "integer window or None."
        )
    if state is None:
        return
    if not isinstance(state, NHAState):
        raise ValueError(f"initial_state must be an NHAState, but was {type(state).__name__}.")
    if state.window != window:
        raise ValueError(
            f"The state was made for window {state.window}, but the call has window {window}."
        )


def _is_integer_scalar(x) -> bool:
    return (
        isinstance(x, jax.Array | np.ndarray)
        and x.ndim == 0
        and jnp.issubdtype(x.dtype, jnp.integer)
    )


def _checked(
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
) -> OperatorInputs:
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
    query, key, value, log_gate = map(jnp.asarray, (query, key, value, log_gate))
    slot_query = query if slot_query is None else jnp.asarray(slot_query)
    slot_key = key if slot_key is None else jnp.asarray(slot_key)
    if rotary is not None:
        cos, sin = _checked_rotary(rotary, batch, length, key_width)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
    if state is not None:
        _check_state_shapes(state, batch, num_kv_heads, key_width, value.shape[3], num_slots)
    has_padding = segment_ids is not None
    segment_ids = _checked_segment_ids(segment_ids, batch, length, state)
    if has_padding:
        # What padding holds, NaN included, must not reach a product with a zero weight.
        is_token = (segment_ids > 0)[:, :, None, None]
        query, key, value, log_gate, slot_query, slot_key = (
            jnp.where(is_token, x, 0) for x in (query, key, value, log_gate, slot_query, slot_key)
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
    try:
        cos, sin = rotary
    except (TypeError, ValueError):
        raise ValueError("rotary must be a pair (cos, sin) of arrays.") from None
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
        check_segment_ids(np.asarray(segment_ids), has_initial_state=state is not None)
    return jnp.asarray(segment_ids, jnp.int32)


def _check_state_shapes(state, batch, num_kv_heads, key_width, value_width, num_slots) -> None:
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
    for name, shape in expected.items():
        found = getattr(state, name).shape
        if found != shape:
            raise ValueError(f"The state's {name} must have shape {shape} here, but has {found}.")
    if state.window is not None and capacity < state.window:
        raise ValueError(
            f"The state has {capacity} rows, fewer than its window of {state.window} tokens."
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


__all__: list[str] = [
    "IMPLEMENTATIONS",
    "Availability",
    "explain_choice",
    "native_hybrid_attention",
    "native_hybrid_attention_step",
]
