"""The reference implementation: `jax.lax.scan`, one token at a time."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nha_jax.ops.inputs import OperatorInputs, result_dtypes
from nha_jax.ops.state import NHAState
from nha_jax.ops.step import Token, step_batch


def run(
    inputs: OperatorInputs,
) -> tuple[Float[Array, "B T N V"], NHAState, Float[Array, "B T N"]]:
    """Runs the operator token by token.

    Returns:
        (output, state after the last token, slot share). For a traced window the state is that
        of the scan, for no caller to use.
    """
    batch, length = inputs.segment_ids.shape
    state = inputs.state
    window: Any = inputs.window
    full: Any = inputs.window is None
    if not inputs.window_is_static:
        full = window >= length
        window = jnp.clip(window, 0, length)
    if state is None:
        state_window = window if inputs.window_is_static else length
        window_dtype, _ = result_dtypes(inputs)
        state = NHAState.init(
            batch,
            inputs.key.shape[2],
            inputs.key.shape[3],
            inputs.value.shape[3],
            inputs.log_gate.shape[3],
            window=state_window,
            capacity=length if state_window is None else state_window,
            dtype=window_dtype,
        )

    def step(state, tokens):
        return step_batch(state, tokens, inputs, window=window, full=full)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), Token.of(inputs))
    state, (out, slot_share) = _scan_with_sparse_residuals(step, state, tokens)
    out = jnp.moveaxis(out, 0, 1).astype(inputs.value.dtype)
    return out, state, jnp.moveaxis(slot_share, 0, 1)


def _scan_with_sparse_residuals(body, carry, tokens: Token):
    """`jax.lax.scan` whose gradient keeps about 2 sqrt(T) carries instead of T.

    A carry holds the whole window, so a plain scan would keep T x W keys and values. The end is
    filled up with padding, which is a no-op.
    """
    length = tokens.segment_id.shape[0]
    inner = math.isqrt(length)
    outer = -(-length // inner)

    def blocked(x):
        x = jnp.pad(x, [(0, outer * inner - length)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(outer, inner, *x.shape[1:])

    @jax.checkpoint
    def block(carry, tokens):
        return jax.lax.scan(body, carry, tokens)

    carry, ys = jax.lax.scan(block, carry, jax.tree.map(blocked, tokens))
    return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:length], ys)
