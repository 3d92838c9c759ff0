"""Where each token's segment begins: everything packing and padding mean to the chunked form.

A segment is one unbroken run of its id. All masks follow from two numbers a token: `start`, the
index at which its segment begins (negative where an initial state's segment continues), and whether
it is a token at all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from nha_jax.ops.state import NHAState


class SegmentLayout(NamedTuple):
    """Segments of a row, by token index t in 0..T-1.

    Attributes:
        start: [B, T] int32, index of the segment's first token. A segment that continues the
            initial state's starts at minus the number of tokens seen. Padding inherits the start
            of the segment before it, so that it leaves memories as they are.
        is_token: [B, T] bool, False for padding.
        final_length: [B] int32, tokens of the last segment, those of the initial state included.
        final_id: [B] int32, id of the last segment.
    """

    start: Int[Array, "B T"]
    is_token: Bool[Array, "B T"]
    final_length: Int[Array, " B"]
    final_id: Int[Array, " B"]

    @property
    def number(self) -> Int[Array, "B T"]:
        """Each token's number in its segment, from 0."""
        return jnp.arange(self.start.shape[1], dtype=jnp.int32)[None] - self.start


class Counters(NamedTuple):
    """What a state says of the segment that goes on: [B] int32 each, as in `NHAState`."""

    length: Int[Array, " B"]
    segment_id: Int[Array, " B"]


def segment_layout(
    segment_ids: Int[Array, "B T"], state: NHAState | Counters | None
) -> SegmentLayout:
    """Derives the layout from ids (1 and up; 0 = padding) and the initial state."""
    length = segment_ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    is_token = segment_ids > 0
    zeros = jnp.zeros_like(segment_ids[:, :1])
    seen, previous_id = (
        (zeros, zeros) if state is None else (state.length[:, None], state.segment_id[:, None])
    )
    previous = jnp.concatenate([previous_id, segment_ids[:, :-1]], axis=1)
    begins = is_token & (segment_ids != previous)
    start = jax.lax.cummax(jnp.where(begins, index, -seen), axis=1)
    last = jnp.max(jnp.where(is_token, index, -1), axis=1)
    final_length = last - start[:, -1] + 1
    last_id = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    final_id = jnp.where(last >= 0, last_id, previous_id[:, 0])
    return SegmentLayout(start, is_token, final_length, final_id)


def check_segment_ids(segment_ids: np.ndarray, *, has_initial_state: bool) -> None:
    """Refuses ids that are not runs of tokens with padding between them (DESIGN section 1).

    Raises:
        ValueError: for negative ids, padding between two tokens of one segment, and, with an
            initial state, padding before the end of a row.
    """
    if segment_ids.min(initial=0) < 0:
        row, column = np.argwhere(segment_ids < 0)[0]
        raise ValueError(
            "segment_ids must be 0 (padding) or positive, but found "
            f"{segment_ids[row, column]} in row {row} at position {column}."
        )
    is_token = segment_ids > 0
    for row in np.flatnonzero(~is_token.all(axis=1)):
        tokens = np.flatnonzero(is_token[row])
        if tokens.size == 0:
            continue
        gaps = tokens[1:][np.diff(tokens) > 1]
        before = tokens[:-1][np.diff(tokens) > 1]
        if has_initial_state and (tokens[0] > 0 or gaps.size):
            raise ValueError(
                "segment_ids: with an initial state padding (id 0) may stand only at the end of a "
                f"row, but row {row} has it before position {tokens[0] or gaps[0]}."
            )
        same = segment_ids[row, before] == segment_ids[row, gaps]
        if same.any():
            position = gaps[same][0]
            raise ValueError(
                "segment_ids: padding (id 0) may not stand between two tokens of one segment, but "
                f"in row {row} segment {segment_ids[row, position]} goes on after padding at "
                f"position {position}."
            )
