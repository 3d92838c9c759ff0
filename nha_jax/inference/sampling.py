"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Everything is data, one value a sequence, so that one compiled program serves sequences with
different settings side by side. The random numbers of a sequence come from its seed and the number
of the token alone: neither its place in the batch nor the other sequences play a part.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of one sequence are chosen; validated when it is made.

    The filters are applied in the order in which they stand here, each to what the one before left:
    p are the probabilities after penalty and temperature.

    Attributes:
        repetition_penalty: above 1, logits of tokens that stand in the prompt or were generated are
            divided by it where positive and multiplied by it where negative; 1 is no penalty.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; None keeps all.
        top_p: keep the likeliest tokens until their probabilities sum to at least this; 1 keeps
            all. The likeliest is always kept.
        min_p: keep tokens whose probability is at least this share of the likeliest one's.
        seed: seed of the sequence's random numbers, from 0 to 2**32 - 1.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._check("repetition_penalty", lambda value: value > 0, "above 0")
        self._check("temperature", lambda value: value >= 0, "from 0")
        self._check("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1")
        self._check("min_p", lambda value: 0 <= value <= 1, "from 0 to 1")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k is {self.top_k!r}, but must be None or an integer from 1.")
        if not _is_integer(self.seed) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed!r}, but must be an integer from 0 to 2**32 - 1.")

    def _check(self, name: str, is_valid: Callable[[float], bool], valid: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not is_valid(value):
            raise ValueError(f"{name} is {value!r}, but must be a number {valid}.")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


GREEDY = Sampling(temperature=0.0)
"""The likeliest token every time."""


@struct.dataclass
class SamplingArrays:
    """`Sampling` of B sequences as data; `top_k` 0 stands for None."""

    repetition_penalty: Float[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt[Array, " B"]

    @classmethod
    def of(cls, settings: Sequence[Sampling]) -> "SamplingArrays":
        """The settings of some sequences, as NumPy arrays."""

        def column(name: str, dtype: type) -> Any:
            return np.asarray([getattr(setting, name) or 0 for setting in settings], dtype)

        return cls(
            repetition_penalty=column("repetition_penalty", np.float32),
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            seed=column("seed", np.uint32),
        )


def choose_tokens(
    logits: Float[Array, "B V"],
    sampling: SamplingArrays,
    number: Int[Array, " B"],
    seen: Bool[Array, "B V"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Chooses the next token of each sequence.

    Args:
        logits: float32 logits of the model.
        sampling: the sequences' settings.
        number: how many tokens of each sequence were chosen before this one.
        seen: which tokens stand in the prompt or were chosen before.

    Returns:
        (ids int32, natural log of the probability that the model's own softmax gives to each:
        before penalty, temperature and filters).
    """
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    logits = _penalized(logits, seen, sampling.repetition_penalty)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sample() -> Int[Array, " B"]:
        temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
        kept = filter_logits(logits / temperature[:, None], sampling)

        def noise(seed: jax.Array, number: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), number)
            return jax.random.gumbel(key, logits.shape[1:], logits.dtype)

        # The largest of logits plus Gumbel noise is a draw from their softmax.
        drawn = jnp.argmax(kept + jax.vmap(noise)(sampling.seed, number), axis=-1)
        return jnp.where(sampling.temperature > 0, drawn.astype(jnp.int32), likeliest)

    tokens = jax.lax.cond(jnp.any(sampling.temperature > 0), sample, lambda: likeliest)
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen


def filter_logits(logits: Float[Array, "B V"], sampling: SamplingArrays) -> Float[Array, "B V"]:
    """Sets the logits of tokens that top-k, top-p or min-p leave out to -inf.

    Args:
        logits: logits after penalty and temperature.
        sampling: the settings.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    ranked = (sampling.top_k > 0) | (sampling.top_p < 1)

    def by_rank() -> Bool[Array, "B V"]:
        # Ranks, not thresholds: of equal logits the token with the smaller id comes first, and
        # top_k=1 keeps one token.
        order = jnp.argsort(-logits, axis=-1, stable=True)
        place = jnp.arange(logits.shape[-1])[None]
        within = (place < sampling.top_k[:, None]) | (sampling.top_k[:, None] == 0)
        descending = jnp.take_along_axis(logits, order, axis=-1)
        weights = jnp.where(within, jnp.exp(descending - top), 0)
        share = weights / jnp.sum(weights, axis=-1, keepdims=True)
        before = jnp.cumsum(share, axis=-1) - share
        within &= (before < sampling.top_p[:, None]) | (place == 0)
        # A row without these filters keeps all, whatever its batch mates have.
        within |= ~ranked[:, None]
        rows = jnp.arange(logits.shape[0])[:, None]
        return jnp.zeros(logits.shape, bool).at[rows, order].set(within)

    keep = jax.lax.cond(jnp.any(ranked), by_rank, lambda: jnp.ones(logits.shape, bool))
    keep &= jnp.exp(logits - top) >= sampling.min_p[:, None]
    return jnp.where(keep, logits, -jnp.inf)


def _penalized(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, " B"]
) -> Float[Array, "B V"]:
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
