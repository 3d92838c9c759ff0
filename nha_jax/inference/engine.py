"""`nha_jax.Engine`: many prompts through a fixed number of places on the device."""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nha_jax.data.tokenizers import Tokenizer
from nha_jax.inference.decode import MAX_STEPS, Chosen, Sequences, begin, decode
from nha_jax.inference.generate import (
    Callback,
    Generation,
    Record,
    check_vocabulary,
    encode_prompt,
    end_id_rows,
    seen_tokens,
)
from nha_jax.inference.prefill import prefill_chunk
from nha_jax.inference.sampling import GREEDY, Sampling, SamplingArrays
from nha_jax.inference.sequences import select_sequences
from nha_jax.models.language_model import LanguageModelState, NHALanguageModel


@dataclasses.dataclass
class _Request:
    """A prompt on its way."""

    number: int
    prompt: list[int]
    sampling: Sampling
    limit: int
    record: Record
    on_tokens: Callback | None
    read: int = 0  # tokens of the prompt that the state has

    @property
    def is_read(self) -> bool:
        return self.read == len(self.prompt)


class Engine:
    """Generates for any number of prompts with a fixed number of sequences on the device.

    A sequence that ends gives its place to the next prompt at once: the others go on, and nothing
    is compiled again. Prompts are read in chunks between steps of decoding, several of them side by
    side, so that a long one does not hold up the sequences that are being generated.

        engine = Engine(model, params, num_sequences=16, max_prompt=1000, max_output=200,
                        tokenizer=tokenizer)
        for prompt in prompts:
            engine.submit(prompt)
        for number, generation in engine.run():
            ...

    A sequence depends on its own prompt and settings alone: its place is overwritten as a whole
    when it begins, and its random numbers come from its own seed. Not for use by several threads
    at once.
    """

    def __init__(
        self,
        model: NHALanguageModel,
        params: Any,
        *,
        num_sequences: int,
        max_prompt: int,
        max_output: int,
        windows: Any = None,
        tokenizer: Tokenizer | None = None,
        end_ids: Sequence[int] | None = None,
        prefill_chunk: int = 256,
        prefill_sequences: int | None = None,
        steps: int = 8,
    ) -> None:
        """Allocates the states; compiles when first used.

        Args:
            model: the model.
            params: its parameters; see `nha_jax.inference.params.cast_params`.
            num_sequences: sequences that are generated at once.
            max_prompt: most tokens of a prompt. Layers of full attention hold memory for
                `max_prompt + max_output` tokens a sequence; others do not grow with it.
            max_output: most tokens generated for a prompt.
            windows: windows of the layers in any form that `parse_windows` reads; None for the
                model's.
            tokenizer: to read and write text.
            end_ids: tokens that end a sequence; None is the tokenizer's end-of-sequence.
            prefill_chunk: tokens of each prompt that are read between two calls of decoding.
            prefill_sequences: prompts that are read side by side; None is 4, or `num_sequences`
                where that is smaller.
            steps: tokens of each sequence that are generated in one call, from 1 to 16. More of
                them mean fewer waits for the host, and more steps in which an ended sequence's
                place is idle.

        Raises:
            ValueError: a number is out of range, or the windows do not fit the model.
        """
        if prefill_sequences is None:
            prefill_sequences = min(4, num_sequences)
        for name, value, high in (
            ("num_sequences", num_sequences, None),
            ("max_prompt", max_prompt, None),
            ("max_output", max_output, None),
            ("prefill_chunk", prefill_chunk, None),
            ("prefill_sequences", prefill_sequences, None),
            ("steps", steps, MAX_STEPS),
        ):
            if value < 1 or (high is not None and value > high):
                valid = "1 or more" if high is None else f"from 1 to {high}"
                raise ValueError(f"{name} is {value}, but must be {valid}.")
        self.num_sequences = num_sequences
        self.max_prompt = max_prompt
        self.max_output = max_output
        self._model = model
        self._params = params
        self._tokenizer = tokenizer
        if end_ids is None:
            end_ids = () if tokenizer is None else (tokenizer.eos_id,)
        self._end_ids = [int(token) for token in end_ids]
        self._chunk = min(prefill_chunk, max_prompt)
        self._steps = steps

        init = functools.partial(
            model.init_state, windows=windows, capacity=max_prompt + max_output
        )
        vocab_size = model.config.vocab_size
        self._reading_state = init(prefill_sequences)
        self._reading_logits = jnp.zeros((prefill_sequences, vocab_size), jnp.float32)
        # One array each: they are donated, and a buffer can be donated once only.
        count, limit, token = (jnp.zeros((num_sequences,), jnp.int32) for _ in range(3))
        self._sequences = Sequences(
            state=init(num_sequences),
            token=token,
            count=count,
            limit=limit,
            active=jnp.zeros((num_sequences,), bool),
            sampling=jax.tree.map(jnp.asarray, SamplingArrays.of([GREEDY] * num_sequences)),
            end_ids=jnp.asarray(end_id_rows(self._end_ids, num_sequences)),
            seen=jnp.zeros((num_sequences, vocab_size), bool),
        )
        self._next_number = 0
        self._waiting: collections.deque[_Request] = collections.deque()
        self._reading: list[_Request | None] = [None] * prefill_sequences
        self._generating: list[_Request | None] = [None] * num_sequences
        self._ended: list[_Request] = []

    @property
    def waiting(self) -> int:
        """Prompts that have no place yet."""
        return len(self._waiting)

    @property
    def generating(self) -> int:
        """Sequences that are being generated."""
        return sum(request is not None for request in self._generating)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do or to hand out."""
        places = (*self._reading, *self._generating)
        return bool(self._waiting or self._ended or any(places))

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        on_tokens: Callback | None = None,
    ) -> int:
        """Puts a prompt in the queue.

        Args:
            prompt: text (with the engine's tokenizer; begin-of-sequence is put in front), or token
                ids, at least one.
            max_tokens: most tokens to generate, at most `max_output`, which None stands for.
            sampling: how tokens are chosen.
            stop: strings that end the text; they need a tokenizer.
            on_tokens: called with (number, new tokens, new text) as they come.

        Returns:
            The number of the prompt, under which its result comes.

        Raises:
            ValueError: the prompt is empty or longer than `max_prompt`, or an argument is not
                valid.
        """
        max_tokens = self.max_output if max_tokens is None else max_tokens
        if not 1 <= max_tokens <= self.max_output:
            raise ValueError(
                f"max_tokens is {max_tokens}, but must be from 1 to {self.max_output}, the "
                "engine's max_output."
            )
        if stop and self._tokenizer is None:
            raise ValueError("stop needs a tokenizer: stop strings are looked for in text.")
        if "" in stop:
            raise ValueError("stop holds an empty string, which would end every text at once.")
        ids = encode_prompt(prompt, self._tokenizer, begins=True)
        if not ids:
            raise ValueError("The prompt is empty, but must have at least one token.")
        if len(ids) > self.max_prompt:
            raise ValueError(
                f"The prompt has {len(ids)} tokens, but the engine takes at most "
                f"{self.max_prompt} (its max_prompt)."
            )
        number = self._next_number
        check_vocabulary([ids], self._model.config.vocab_size)
        record = Record(ids, max_tokens, self._tokenizer, self._end_ids, stop)
        self._waiting.append(_Request(number, ids, sampling, max_tokens, record, on_tokens))
        self._next_number += 1
        return number

    def cancel(self, number: int) -> bool:
        """Ends a sequence wherever it is; its result comes with finish_reason "cancelled".

        Args:
            number: as `submit` returned it.

        Returns:
            Whether it had not ended yet.
        """
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                self._end(request, "cancelled")
                return True
        for places in (self._reading, self._generating):
            for place, occupant in enumerate(places):
                if occupant is not None and occupant.number == number:
                    places[place] = None
                    self._end(occupant, "cancelled")
                    if places is self._generating:
                        self._stop_places([place])
                    return True
        return False

    def step(self) -> list[tuple[int, Generation]]:
        """Reads one chunk of the prompts that are being read, and decodes one call's steps.

        Returns:
            (number, result) of each sequence that has ended since the last call.
        """
        self._read_prompts()
        first = self._begin_sequences()
        if any(self._generating):
            self._sequences, chosen = decode(
                self._model, self._params, self._sequences, self._steps
            )
            self._hand_out(first, chosen)
        ended, self._ended = self._ended, []
        return [(request.number, request.record.generation()) for request in ended]

    def run(self) -> Iterator[tuple[int, Generation]]:
        """Yields (number, result) of each sequence as it ends, until nothing is left to do.

        More prompts may be submitted meanwhile.
        """
        while self.busy:
            yield from self.step()

    def _read_prompts(self) -> None:
        """Reads the next chunk of every prompt that has a place for reading."""
        fresh = np.zeros(len(self._reading), bool)
        for place, request in enumerate(self._reading):
            if request is None and self._waiting:
                self._reading[place] = self._waiting.popleft()
                fresh[place] = True
        tokens = np.zeros((len(self._reading), self._chunk), np.int32)
        counts = np.zeros(len(self._reading), np.int32)
        for place, request in enumerate(self._reading):
            if request is not None and not request.is_read:
                part = request.prompt[request.read : request.read + self._chunk]
                tokens[place, : len(part)] = part
                counts[place] = len(part)
                request.read += len(part)
        if counts.any():
            self._reading_logits, self._reading_state = _read_chunk(
                self._model,
                self._params,
                tokens,
                counts,
                fresh,
                self._reading_logits,
                self._reading_state,
            )

    def _begin_sequences(self) -> list[tuple[int, Chosen]]:
        """Gives free places to prompts that are read: (place, its first token) of each."""
        first = []
        free = (place for place, request in enumerate(self._generating) if request is None)
        ready = [
            place
            for place, request in enumerate(self._reading)
            if request is not None and request.is_read
        ]
        # In the order of the queue: a later prompt that was read sooner does not overtake.
        ready.sort(key=lambda place: self._reading[place].number)  # type: ignore[union-attr]
        for source, target in zip(ready, free, strict=False):
            request = self._reading[source]
            assert request is not None
            self._sequences, chosen = _place_sequence(
                self._sequences,
                target,
                self._reading_logits,
                self._reading_state,
                source,
                SamplingArrays.of([request.sampling]),
                np.asarray([request.limit], np.int32),
                end_id_rows(self._end_ids, 1),
                seen_tokens([request.prompt], self._model.config.vocab_size),
            )
            self._reading[source] = None
            self._generating[target] = request
            first.append((target, chosen))
        return first

    def _hand_out(self, first: list[tuple[int, Chosen]], chosen: Chosen) -> None:
        """Waits for the device, once, and gives every request its tokens."""
        first_on_host, on_host = jax.device_get((first, chosen))
        stopped = []
        begun = dict(first_on_host)
        for place, request in enumerate(self._generating):
            if request is None:
                continue
            parts = [(begun[place], 0)] if place in begun else []
            new, text = [], ""
            for part, column in [*parts, (on_host, place)]:
                for step in np.flatnonzero(part.valid[:, column]):
                    if request.record.reason:
                        break
                    new.append(int(part.tokens[step, column]))
                    text += request.record.push(
                        new[-1], float(part.log_probabilities[step, column])
                    )
            if request.on_tokens is not None and new:
                request.on_tokens(request.number, new, text)
            if request.record.reason:
                # A callback may have cancelled it meanwhile.
                if self._generating[place] is request:
                    self._generating[place] = None
                    self._ended.append(request)
                stopped.append(place)
        self._stop_places(stopped)

    def _stop_places(self, places: Sequence[int]) -> None:
        """Makes sequences inactive on the device, where they may not know that they have ended."""
        if places:
            going_on = np.ones(self.num_sequences, bool)
            going_on[list(places)] = False
            active = self._sequences.active & going_on
            self._sequences = dataclasses.replace(self._sequences, active=active)

    def _end(self, request: _Request, reason: str) -> None:
        request.record.end(reason)
        self._ended.append(request)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("logits", "state"))
def _read_chunk(
    model: NHALanguageModel,
    params: Any,
    tokens: Int[Array, "P S"],
    counts: Int[Array, " P"],
    fresh: Bool[Array, " P"],
    logits: Float[Array, "P V"],
    state: LanguageModelState,
) -> tuple[Float[Array, "P V"], LanguageModelState]:
    """`prefill_chunk`, with rows emptied where another prompt begins."""

    def emptied(leaf: jax.Array) -> jax.Array:
        return jnp.where(fresh.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.zeros((), leaf.dtype), leaf)

    return prefill_chunk(model, params, tokens, counts, logits, jax.tree.map(emptied, state))


@functools.partial(jax.jit, donate_argnames=("sequences",))
def _place_sequence(
    sequences: Sequences,
    target: int | Int[Array, ""],
    logits: Float[Array, "P V"],
    state: LanguageModelState,
    source: int | Int[Array, ""],
    sampling: SamplingArrays,
    limit: Int[Array, " 1"],
    end_ids: Int[Array, "1 E"],
    seen: Bool[Array, "1 V"],
) -> tuple[Sequences, Chosen]:
    """Overwrites one place with a prompt that is read, and chooses its first token."""
    rows = jnp.asarray(source)[None]
    one, chosen = begin(
        jnp.take(logits, rows, axis=0),
        select_sequences(state, rows),
        sampling,
        limit,
        end_ids,
        seen,
    )
    return jax.tree.map(lambda all_, new: all_.at[target].set(new[0]), sequences, one), chosen
