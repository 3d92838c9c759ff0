"""Positions of tokens inside their segments."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from nha_jax.ops.segments import segment_layout
from nha_jax.ops.state import NHAState


def segment_positions(
    segment_ids: Int[Array, "B T"] | None, length: int, state: NHAState | None = None
) -> Int32[Array, "*B T"]:
    """Counts the tokens of every segment from 0; a segment that a state began is counted on.

    Args:
        segment_ids: ids from 1, 0 = padding; None means one segment a row, without padding, that of
            the state.
        length: number of tokens T.
        state: state of the operator after the tokens before, or None.

    Returns:
        [T] without segment ids and state, else [B, T]. Positions of padding mean nothing.
    """
    if segment_ids is not None:
        return segment_layout(segment_ids, state).number
    steps = jnp.arange(length, dtype=jnp.int32)
    return steps if state is None else steps[None] + state.length[:, None]
