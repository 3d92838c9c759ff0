"""The operator's public functions: what they take, what they refuse, which implementation runs."""

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nha_jax.ops import chunked, kernels, reference, step
from nha_jax.ops.inputs import OperatorInputs
from nha_jax.ops.state import NHAState
from nha_jax.ops.validation import check_flags, check_window_and_state, checked_inputs

_logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "xla", "pallas", "triton")


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
            int32 scalar, with which one compilation serves all windows. A traced value >= T is full
            attention, which never reads slots, not even as sinks; no state goes with it.
        slot_query: [B, T, N, H], default `query` before rotation.
        slot_key: [B, T, K, H], default `key` before rotation.
        rotary: (cos, sin), each [T, H/2] or [B, T, H/2]; row t rotates token t, on the window path
            only, first half of the width paired with the second.
        segment_ids: [B, T] integers; ids from 1, 0 = padding. A segment is an unbroken run of its
            id; a token sees its own segment only. Padding may stand before, between and after
            segments (with `initial_state` only after) and comes out as 0.
        scale: Factor on all logits; None is H**-0.5.
        empty_slots: "masked": slots take part only once a token of the segment has left the window.
            "sink": empty slots take part as zero keys and zero values, for a static W >= T too.
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
    check_flags(return_state=return_state, return_slot_share=return_slot_share)
    check_window_and_state(window, initial_state, name="initial_state", return_state=return_state)
    inputs = checked_inputs(
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
        state_name="initial_state",
    )
    state: NHAState | None
    name = _resolve(implementation, inputs)
    if name == "reference":
        out, state, slot_share = reference.run(inputs)
    elif name == "xla":
        out, state, slot_share = chunked.run(inputs, return_state=return_state)
    else:
        out, state, slot_share = kernels.run(name, inputs, return_state=return_state)
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
    check_flags(return_slot_share=return_slot_share)
    check_window_and_state(window, state, name="state", return_state=True)
    inputs = checked_inputs(
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
        state_name="state",
    )
    _resolve(implementation, inputs)  # one token is the same program in all of them
    out, new_state, slot_share = step.run(inputs)
    return (out, new_state, slot_share) if return_slot_share else (out, new_state)


class Availability(NamedTuple):
    """One implementation of the operator, as `explain_choice` reports it."""

    name: str
    available: bool
    reason: str


def explain_choice() -> tuple[str, list[Availability]]:
    """The implementation that `implementation=None` takes for 16-bit inputs on the default device.

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
    for name, family in kernels.FAMILIES.items():
        problem = kernels.missing(name)
        reason = f"kernels for NVIDIA GPUs, {family.hardware}; float32 inputs take it by name only"
        found.append(Availability(name, problem is None, problem or reason))
    able = {each.name for each in found if each.available}
    return next((name for name in kernels.PREFERRED if name in able), "xla"), found


@functools.cache
def _log_choice(name: str) -> None:
    _logger.info("native_hybrid_attention: implementation %r on %s", name, jax.default_backend())


def _resolve(implementation: str | None, inputs: OperatorInputs) -> str:
    if implementation is None:
        name = kernels.choose(inputs) or "xla"
        _log_choice(name)
        return name
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}, but "
            f"was {implementation!r}."
        )
    if implementation in kernels.FAMILIES:
        problem = kernels.unsupported(implementation, inputs)
        if problem is not None:
            raise NotImplementedError(
                f"implementation={implementation!r} cannot run: {problem}; use 'xla', or None for "
                "the best available."
            )
    return implementation


__all__: list[str] = [
    "IMPLEMENTATIONS",
    "Availability",
    "explain_choice",
    "native_hybrid_attention",
    "native_hybrid_attention_step",
]
