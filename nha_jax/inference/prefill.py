"""Reading prompts: in chunks of one size, whatever their lengths and however they are padded."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nha_jax.inference.sequences import smallest_capacity
from nha_jax.models.language_model import LanguageModelState, NHALanguageModel
from nha_jax.ops.inputs import capacity_error


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of any lengths as one array, padded on the right.

    Args:
        prompts: token ids of each prompt.

    Returns:
        (tokens, segment_ids), both int32 [B, P]; the ids are 1, and 0 where padded.

    Raises:
        ValueError: there is no prompt, or one of them is empty.
    """
    if not len(prompts):
        raise ValueError("prompts is empty, but must hold at least one prompt.")
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == 0:
        raise ValueError(
            f"prompt {lengths.index(0)} is empty, but must have at least one token: begin it with "
            "the tokenizer's begin-of-sequence token."
        )
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    segment_ids = (np.arange(max(lengths))[None] < np.asarray(lengths)[:, None]).astype(np.int32)
    return tokens, segment_ids


def prefill(
    model: NHALanguageModel,
    params: Any,
    tokens: Int[Array, "B P"],
    *,
    segment_ids: Int[Array, "B P"] | None = None,
    state: LanguageModelState | None = None,
    windows: Any = None,
    capacity: int | None = None,
    chunk: int = 512,
) -> tuple[Float[Array, "B V"], LanguageModelState]:
    """Reads prompts into a state, `chunk` tokens at a time.

    Memory for activations is that of one chunk, however long the prompts are, and one compiled
    program serves all prompts of a batch size and chunk size.

    Args:
        model: the model.
        params: its parameters.
        tokens: int32 ids, one prompt a row.
        segment_ids: 0 where a row is padded, on its left or its right or both, and one positive
            id elsewhere; None where nothing is padded.
        state: state to go on from (not changed); every row goes on with its segment. None begins
            with an empty one.
        windows: windows of the layers, for an empty state; None for those of the model.
        capacity: most tokens a sequence may come to, for an empty state with layers of full
            attention; None is the length of the longest prompt, which leaves no room to go on.
        chunk: tokens of a chunk, S.

    Returns:
        (logits [B, vocab_size] float32 after each prompt's last token, state after the prompts).

    Raises:
        ValueError: a prompt is empty, is padded inside, or is longer than the state can hold.
    """
    rows, lengths = left_aligned(tokens, segment_ids)
    if state is None:
        capacity = int(lengths.max()) if capacity is None else capacity
        state = model.init_state(len(lengths), windows=windows, capacity=capacity)
    else:
        state = jax.tree.map(
            jnp.copy, state
        )  # what the chunks are donated must not be the caller's
    return read_prompts(model, params, rows, lengths, state, chunk=chunk)


def read_prompts(
    model: NHALanguageModel,
    params: Any,
    rows: np.ndarray,
    lengths: np.ndarray,
    state: LanguageModelState,
    *,
    chunk: int,
) -> tuple[Float[Array, "B V"], LanguageModelState]:
    """`prefill` for prompts as from `left_aligned`, with a state that is donated."""
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, but must be 1 or more.")
    limit = smallest_capacity(state)
    total = np.asarray(state.length) + lengths
    if limit is not None and total.max() > limit:
        raise capacity_error(total, limit)
    logits = jnp.zeros((len(lengths), model.config.vocab_size), jnp.float32)
    for start in range(0, rows.shape[1], chunk):
        part = rows[:, start : start + chunk]
        part = np.pad(part, ((0, 0), (0, chunk - part.shape[1])))
        counts = np.clip(lengths - start, 0, chunk).astype(np.int32)
        logits, state = prefill_chunk(model, params, part, counts, logits, state)
    return logits, state


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("logits", "state"))
def prefill_chunk(
    model: NHALanguageModel,
    params: Any,
    tokens: Int[Array, "B S"],
    counts: Int[Array, " B"],
    logits: Float[Array, "B V"],
    state: LanguageModelState,
) -> tuple[Float[Array, "B V"], LanguageModelState]:
    """Reads the first `counts` tokens of each row of a chunk; logits and state are donated.

    Args:
        model: the model (static).
        params: its parameters.
        tokens: ids; what stands beyond a row's count is not looked at.
        counts: tokens of each row, from 0 (the row stays as it is) to S.
        logits: logits after each row's last token so far.
        state: the state.

    Returns:
        (logits after each row's last token, state).
    """
    real = jnp.arange(tokens.shape[1])[None] < counts[:, None]
    segment_ids = jnp.where(real, jnp.maximum(state.segment_id, 1)[:, None], 0)
    results: Any = model.apply(
        {"params": params},
        tokens,
        segment_ids=segment_ids,
        windows=state.windows,
        state=state,
        return_state=True,
        logits_at=jnp.maximum(counts - 1, 0)[:, None],
    )
    new_logits, state = results
    logits = jnp.where((counts > 0)[:, None], new_logits[:, 0].astype(logits.dtype), logits)
    return logits, state


def left_aligned(tokens: Any, segment_ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Moves prompts to the left edge of their rows, which changes nothing: positions are counted.

    Args:
        tokens: [B, P] integers.
        segment_ids: as in `prefill`.

    Returns:
        (tokens int32 [B, longest], lengths [B]).

    Raises:
        ValueError: as `prefill`.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"tokens has shape {tokens.shape} and dtype {tokens.dtype}, but must be integers "
            "[B, P]."
        )
    real = np.ones(tokens.shape, bool)
    if segment_ids is not None:
        segment_ids = np.asarray(segment_ids)
        if segment_ids.shape != tokens.shape:
            raise ValueError(
                f"segment_ids has shape {segment_ids.shape}, but must be that of tokens, "
                f"{tokens.shape}."
            )
        real = segment_ids > 0
    lengths = real.sum(axis=1)
    if tokens.size == 0 or lengths.min() == 0:
        row = int(np.argmin(lengths)) if tokens.shape[0] else 0
        raise ValueError(f"prompt {row} is empty, but must have at least one token.")
    rows = np.zeros(tokens.shape, np.int32)
    for row, length in enumerate(lengths):
        (places,) = np.nonzero(real[row])
        if places[-1] - places[0] + 1 != length or (
            segment_ids is not None and np.ptp(segment_ids[row, places])
        ):
            raise ValueError(
                f"segment_ids of prompt {row} must be one run of one id with padding (0) only "
                "before and after it."
            )
        rows[row, :length] = tokens[row, places]
    return rows[:, : lengths.max()], lengths
