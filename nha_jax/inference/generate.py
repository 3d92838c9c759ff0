"""`nha_jax.generate`: prompts in, continuations out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nha_jax.data.tokenizers import Tokenizer
from nha_jax.inference.decode import MAX_STEPS, Chosen, append, begin, decode
from nha_jax.inference.prefill import pad_prompts, read_prompts
from nha_jax.inference.sampling import GREEDY, Sampling, SamplingArrays
from nha_jax.inference.sequences import smallest_capacity
from nha_jax.inference.text import TextStream
from nha_jax.models.language_model import LanguageModelState, NHALanguageModel

# Called as (number of the prompt, new tokens, new text); the text is "" without a tokenizer.
Callback = Callable[[int, list[int], str], None]

# Prompts that are shorter are read as one chunk of this many tokens.
_SMALLEST_CHUNK = 16
# Capacities are rounded up to a multiple of this, so that not every length is compiled anew.
_CAPACITY_UNIT = 128


@dataclasses.dataclass(frozen=True)
class Generation:
    """The continuation of one prompt.

    Attributes:
        tokens: ids generated, an end token included, and with a stop string those that complete it.
        text: text of the tokens, without end token and without what follows from a stop string on;
            None without a tokenizer.
        log_probabilities: of each token, natural log under the model's own softmax (before penalty,
            temperature and filters).
        finish_reason: "end" (an end token), "stop" (a stop string), "length" (`max_tokens`) or
            "cancelled".
    """

    tokens: list[int]
    text: str | None
    log_probabilities: list[float]
    finish_reason: str


def generate(
    model: NHALanguageModel,
    params: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    tokenizer: Tokenizer | None = None,
    end_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    windows: Any = None,
    capacity: int | None = None,
    prefill_chunk: int = 512,
    state: LanguageModelState | None = None,
    return_state: bool = False,
    on_tokens: Callback | None = None,
) -> Any:
    """Continues prompts of any lengths, all at once.

    The whole of a step, from the token to the next one, runs on the device, and many steps are one
    program. A sequence depends on its prompt, `sampling` and nothing else: not on the other prompts
    or its place among them (up to the rounding of products of another shape).

    Args:
        model: the model.
        params: its parameters; `nha_jax.inference.params.cast_params` makes steps cheaper.
        prompts: texts (with `tokenizer`; begin-of-sequence is put in front unless `state` is given)
            or token ids, at least one token each.
        max_tokens: most tokens to generate for a prompt.
        sampling: how tokens are chosen, for all prompts or one for each; greedy unless given.
        tokenizer: to read and write text.
        end_ids: tokens that end a sequence; None is the tokenizer's end-of-sequence, if there is
            one.
        stop: strings that end a sequence; they need `tokenizer`.
        windows: windows of the layers in any form that `parse_windows` reads; None for the model's.
        capacity: most tokens a sequence may come to, prompt included, which is what layers of full
            attention hold memory for; None is what these prompts need.
        prefill_chunk: most tokens of the prompts read at once, which bounds memory.
        state: state to go on from, one row for each prompt (not changed); `windows` and `capacity`
            are its own.
        return_state: also return the state after the last token of each sequence.
        on_tokens: called with (number of the prompt, new tokens, new text) as they come.

    Returns:
        One `Generation` a prompt (with `return_state` a tuple of that list and the state).

    Raises:
        ValueError: a prompt is empty or too long for `capacity`, or an argument is not valid.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, but must be 1 or more.")
    if stop and tokenizer is None:
        raise ValueError("stop needs tokenizer: stop strings are looked for in text.")
    if "" in stop:
        raise ValueError("stop holds an empty string, which would end every text at once.")
    if state is not None and (windows is not None or capacity is not None):
        raise ValueError("windows and capacity belong to state: give either them or state.")
    ids = [encode_prompt(prompt, tokenizer, begins=state is None) for prompt in prompts]
    tokens, segment_ids = pad_prompts(ids)
    check_vocabulary(ids, model.config.vocab_size)
    settings = [sampling] * len(ids) if isinstance(sampling, Sampling) else list(sampling)
    if len(settings) != len(ids):
        raise ValueError(f"sampling has {len(settings)} entries for {len(ids)} prompts.")
    if end_ids is None:
        end_ids = () if tokenizer is None else (tokenizer.eos_id,)

    lengths = segment_ids.sum(axis=1)
    if state is None:
        if capacity is None:
            capacity = -(-(int(lengths.max()) + max_tokens) // _CAPACITY_UNIT) * _CAPACITY_UNIT
        state = model.init_state(len(ids), windows=windows, capacity=capacity)
    else:
        state = jax.tree.map(jnp.copy, state)  # what is donated must not be the caller's
    _check_room(state, lengths, max_tokens)
    # Powers of two: short prompts are not padded much, and few programs are compiled.
    chunk = max(_SMALLEST_CHUNK, 1 << (int(lengths.max()) - 1).bit_length())
    chunk = min(prefill_chunk, chunk)
    logits, state = read_prompts(model, params, tokens, lengths, state, chunk=chunk)
    sequences, chosen = begin(
        logits,
        state,
        SamplingArrays.of(settings),
        np.full(len(ids), max_tokens, np.int32),
        end_id_rows(end_ids, len(ids)),
        seen_tokens(ids, model.config.vocab_size),
    )
    records = [Record(prompt, max_tokens, tokenizer, end_ids, stop) for prompt in ids]
    _take(records, chosen, on_tokens)
    # The state that is returned must not have tokens from beyond a stop string.
    steps = 1 if return_state and stop else MAX_STEPS
    while not all(record.reason for record in records):
        going_on = np.asarray([not record.reason for record in records])
        sequences = dataclasses.replace(sequences, active=going_on)
        sequences, chosen = decode(model, params, sequences, steps)
        _take(records, chosen, on_tokens)
    generations = [record.generation() for record in records]
    if return_state:
        return generations, append(model, params, sequences.state, sequences.token)
    return generations


class Record:
    """What was generated for one prompt so far.

    Attributes:
        tokens: the tokens.
        log_probabilities: of each.
        reason: the finish reason, "" while it goes on.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        limit: int,
        tokenizer: Tokenizer | None,
        end_ids: Sequence[int],
        stop: Sequence[str],
    ) -> None:
        """Nothing generated yet.

        Args:
            prompt: tokens before those that are generated.
            limit: tokens after which the sequence ends.
            tokenizer: to write text, or None.
            end_ids: tokens that end the sequence.
            stop: strings that end it.
        """
        self._limit = limit
        self.tokens: list[int] = []
        self.log_probabilities: list[float] = []
        self.reason = ""
        self._end_ids = frozenset(end_ids)
        self._stream = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer, stop, before=prompt)

    def push(self, token: int, log_probability: float) -> str:
        """Takes a token; returns the text that is certain now and was not before."""
        self.tokens.append(token)
        self.log_probabilities.append(log_probability)
        if token in self._end_ids:
            return self.end("end")
        text = ""
        if self._stream is not None:
            text = self._stream.push([token])
            if self._stream.stopped:
                self.reason = "stop"
        if len(self.tokens) >= self._limit:
            text += self.end("length")
        return text

    def end(self, reason: str) -> str:
        """Ends the sequence unless it has ended; returns the text that was held back."""
        if self.reason:
            return ""
        self.reason = reason
        return "" if self._stream is None else self._stream.finish()

    def generation(self) -> Generation:
        """The result."""
        text = None if self._stream is None else self._stream.text
        return Generation(self.tokens, text, self.log_probabilities, self.reason)


def seen_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Which tokens stand in each prompt, bool [B, V]."""
    seen = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in enumerate(prompts):
        seen[row, np.asarray(prompt)] = True
    return seen


def end_id_rows(end_ids: Sequence[int], batch: int) -> np.ndarray:
    """End tokens of B equal sequences, int32 [B, E], filled up with -1.

    E is a multiple of 4: not every number of end tokens is compiled anew.
    """
    width = 4 * max(1, -(-len(end_ids) // 4))
    rows = np.full((batch, width), -1, np.int32)
    rows[:, : len(end_ids)] = end_ids
    return rows


def encode_prompt(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, *, begins: bool
) -> list[int]:
    """Token ids of a prompt; text gets begin-of-sequence in front where it `begins`.

    Raises:
        ValueError: the prompt is text, but there is no tokenizer, or it is empty.
    """
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise ValueError("prompts holds text, which needs tokenizer; without one give token ids.")
    if not prompt:
        raise ValueError("a prompt is empty text: give at least one character.")
    return [tokenizer.bos_id] * begins + tokenizer.encode(prompt)


def check_vocabulary(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuses ids that the model does not have.

    Raises:
        ValueError: it names the prompt and the id.
    """
    for number, prompt in enumerate(prompts):
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt {number} has the id {token}, but the model's ids are from 0 to "
                    f"{vocab_size - 1}."
                )


def _check_room(state: LanguageModelState, lengths: np.ndarray, max_tokens: int) -> None:
    """Refuses prompts that layers of full attention cannot hold with what is to follow."""
    if state.length.shape[0] != len(lengths):
        raise ValueError(
            f"state has {state.length.shape[0]} sequences, but there are {len(lengths)} prompts."
        )
    capacity = smallest_capacity(state)
    total = np.asarray(state.length) + lengths
    if capacity is not None and total.max() + max_tokens > capacity:
        longest = int(total.max())
        raise ValueError(
            f"A prompt of {longest} tokens (with what the state has seen) and max_tokens of "
            f"{max_tokens} come to {longest + max_tokens} tokens, but a layer of full attention "
            f"holds at most {capacity} (its capacity)."
        )


def _take(records: Sequence[Record], chosen: Chosen, on_tokens: Callback | None) -> None:
    """Hands out what the device chose, in the order of the steps."""
    tokens, log_probabilities, valid = jax.device_get(chosen)
    for row, record in enumerate(records):
        (steps,) = np.nonzero(valid[:, row])
        new, text = [], ""
        for step in steps:
            if record.reason:
                break
            new.append(int(tokens[step, row]))
            text += record.push(new[-1], float(log_probabilities[step, row]))
        if on_tokens is not None and new:
            on_tokens(row, new, text)
