"""One token of one sequence, as DESIGN section 1 defines it.

This is the definition that everything else is judged by: the reference scans it over a sequence,
decoding calls it once. It is written to be read beside the equations.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nha_jax.ops.gates import write_strength
from nha_jax.ops.inputs import OperatorInputs
from nha_jax.ops.state import NHAState


class Token(NamedTuple):
    """The inputs of one token."""

    query: Float[Array, "N H"]
    key: Float[Array, "K H"]
    value: Float[Array, "K V"]
    log_gate: Float[Array, "K M"]
    slot_query: Float[Array, "N H"]
    slot_key: Float[Array, "K H"]
    segment_id: Int[Array, ""]

    @classmethod
    def of(cls, inputs: OperatorInputs) -> "Token":
        """All tokens of a call: every field with axes [B, T, ...]."""
        return cls(
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.log_gate,
            inputs.slot_query,
            inputs.slot_key,
            inputs.segment_ids,
        )


def step_token(
    state: NHAState,
    token: Token,
    *,
    window: int | None | Array,
    full: bool | Array,
    scale: float | Array,
    sink: bool,
    precision: jax.lax.Precision,
) -> tuple[NHAState, tuple[Float[Array, "N V"], Float[Array, " N"]]]:
    """Moves one sequence on by one token and reads both memories.

    Args:
        state: State of one sequence (no batch axis).
        token: The token.
        window: Tokens W that the window holds, this one included; at most the capacity. None
            for full attention.
        full: Whether slots are out of the picture: True for `window` None, and for a traced
            window that covers the sequence.
        scale: Factor on all logits.
        sink: Whether empty slots take part in the softmax, as zero keys and zero values.
        precision: Of the products.

    Returns:
        (new state, (output [N, V], share of the softmax mass on slots [N])), the latter two in the
        accumulator's dtype.
    """
    wide = jnp.promote_types(token.query.dtype, jnp.float32)
    capacity = state.window_key.shape[0]  # no batch axis here
    num_kv_heads, num_slots = token.log_gate.shape
    is_token = token.segment_id > 0  # padding is a no-op
    restart = is_token & (token.segment_id != state.segment_id)
    number = jnp.where(restart, 0, state.length)  # this token's number in its segment
    slot_key = jnp.where(restart, 0, state.slot_key).astype(wide)
    slot_value = jnp.where(restart, 0, state.slot_value).astype(wide)

    # Long-term memory: the token that leaves the window is written to the slots.
    has_left = jnp.zeros((), bool)
    if window is not None:
        leaving = number - window  # with W = 0 the token leaves as it comes
        has_left = is_token & (leaving >= 0)

        def leaving_row(rows, current):
            if capacity == 0:
                return current.astype(wide)
            row = jnp.where(window == 0, current.astype(rows.dtype), rows[leaving % capacity])
            return row.astype(wide)

        log_gate = leaving_row(state.window_log_gate, token.log_gate)
        retention = jnp.exp(log_gate)[..., None]  # a, [K, M, 1]
        strength = write_strength(log_gate)[..., None]  # s = 1 - a
        key = leaving_row(state.window_slot_key, token.slot_key)[:, None]
        value = leaving_row(state.window_value, token.value)[:, None]
        slot_key = jnp.where(has_left, retention * slot_key + strength * key, slot_key)
        slot_value = jnp.where(has_left, retention * slot_value + strength * value, slot_value)

    # Short-term memory: the token enters the window. Padding is written to a row that is not there:
    # choosing between whole arrays afterwards would copy them, and a step would not be in place.
    def enter(rows, new):
        if rows.shape[0] == 0:
            return rows
        row = jnp.where(is_token, number % rows.shape[0], rows.shape[0])
        return rows.at[row].set(new.astype(rows.dtype), mode="drop")

    new_state = dataclasses.replace(
        state,
        slot_key=slot_key.astype(state.slot_key.dtype),
        slot_value=slot_value.astype(state.slot_value.dtype),
        window_key=enter(state.window_key, token.key),
        window_slot_key=enter(state.window_slot_key, token.slot_key),
        window_value=enter(state.window_value, token.value),
        window_log_gate=enter(state.window_log_gate, token.log_gate),
        length=jnp.where(is_token, number + 1, state.length),
        segment_id=jnp.where(is_token, token.segment_id, state.segment_id),
    )
    # The number of the token in each row: the largest one up to `number` that belongs there.
    row_number = number - (number - jnp.arange(capacity)) % max(capacity, 1)
    in_window = row_number >= 0
    if window is not None:
        in_window &= row_number > number - window

    # One softmax over M slots and the window.
    def heads(x):  # [N, H] -> [K, G, H], wide
        return (x.astype(wide) * scale).reshape(num_kv_heads, -1, x.shape[-1])

    slot_logits = jnp.einsum("kgh,kmh->kgm", heads(token.slot_query), slot_key, precision=precision)
    window_logits = jnp.einsum(
        "kgh,ckh->kgc",
        heads(token.query),
        new_state.window_key.astype(wide),
        precision=precision,
    )
    slots_read = jnp.logical_and(jnp.logical_or(sink, has_left), jnp.logical_not(full))
    readable = jnp.concatenate([jnp.broadcast_to(slots_read, (num_slots,)), in_window])
    logits = jnp.concatenate([slot_logits, window_logits], axis=-1)
    weights = masked_softmax(logits, readable[None, None])
    # Rows that are not read may hold anything, NaN included; their weight is 0.
    values = jnp.where(in_window[:, None, None], new_state.window_value.astype(wide), 0)
    out = jnp.einsum(
        "kgm,kmv->kgv", weights[..., :num_slots], slot_value, precision=precision
    ) + jnp.einsum("kgc,ckv->kgv", weights[..., num_slots:], values, precision=precision)
    slot_share = jnp.sum(weights[..., :num_slots], axis=-1)
    if window is None:
        # Under jit a state that is full cannot raise; its outputs must not look right either.
        out = jnp.where(number >= capacity, jnp.nan, out)

    out = jnp.where(is_token, out.reshape(token.query.shape[0], -1), 0)
    return new_state, (out, jnp.where(is_token, slot_share.reshape(-1), 0))


def step_batch(
    state: NHAState, tokens: Token, inputs: OperatorInputs, *, window: int | None | Array, full
) -> tuple[NHAState, tuple[Float[Array, "B N V"], Float[Array, "B N"]]]:
    """`step_token` for one token of each sequence; `inputs` gives what all tokens share."""

    def one(state, token):
        return step_token(
            state,
            token,
            window=window,
            full=full,
            scale=inputs.scale,
            sink=inputs.sink,
            precision=inputs.precision,
        )

    return jax.vmap(one)(state, tokens)


def run(inputs: OperatorInputs) -> tuple[Float[Array, "B 1 N V"], NHAState, Float[Array, "B 1 N"]]:
    """Decodes one token from a state: T is 1, the window static.

    Returns:
        (output, new state, slot share).
    """
    assert inputs.state is not None  # the caller's signature asks for one
    tokens = jax.tree.map(lambda x: x[:, 0], Token.of(inputs))
    state, (out, slot_share) = step_batch(
        inputs.state, tokens, inputs, window=inputs.window, full=inputs.window is None
    )
    return out[:, None].astype(inputs.value.dtype), state, slot_share[:, None]


def masked_softmax(logits: Float[Array, "*shape"], mask: Array) -> Float[Array, "*shape"]:
    """Softmax over the last axis where `mask`, 0 elsewhere; all 0 where nothing is attended.

    Masked logits are replaced before the exponential, so that no NaN comes back in gradients.
    """
    floor = jnp.finfo(logits.dtype).min
    logits = jnp.where(mask, logits, floor)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=floor))
    weights = jnp.where(mask, jnp.exp(logits - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)
