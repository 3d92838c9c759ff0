"""Tokens one at a time, many in one program: the loop that `generate` and the engine share."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from nha_jax.inference.sampling import SamplingArrays, choose_tokens
from nha_jax.models.language_model import LanguageModelState, NHALanguageModel

MAX_STEPS = 16
"""Most tokens that one call of `decode` generates before the host looks at them."""


@struct.dataclass
class Sequences:
    """B sequences that are being generated; every array has the batch axis first.

    Attributes:
        state: what the model remembers: everything but `token`.
        token: [B] int32, the token chosen last; the state does not have it yet.
        count: [B] int32, tokens chosen so far, `token` included.
        limit: [B] int32, tokens after which a sequence ends.
        active: [B] bool, whether the sequence goes on.
        sampling: how each sequence's tokens are chosen.
        end_ids: [B, E] int32, tokens that end a sequence; -1 fills up.
        seen: [B, V] bool, tokens of prompt and continuation.
    """

    state: LanguageModelState
    token: Int[Array, " B"]
    count: Int[Array, " B"]
    limit: Int[Array, " B"]
    active: Bool[Array, " B"]
    sampling: SamplingArrays
    end_ids: Int[Array, "B E"]
    seen: Bool[Array, "B V"]


class Chosen(NamedTuple):
    """Tokens as they were chosen.

    Attributes:
        tokens: [S, B] int32.
        log_probabilities: [S, B] float32, natural logs under the model's own softmax.
        valid: [S, B] bool, False where the sequence had ended before.
    """

    tokens: Int[Array, "S B"]
    log_probabilities: Float[Array, "S B"]
    valid: Bool[Array, "S B"]


@functools.partial(jax.jit, donate_argnames=("state", "seen"))
def begin(
    logits: Float[Array, "B V"],
    state: LanguageModelState,
    sampling: SamplingArrays,
    limit: Int[Array, " B"],
    end_ids: Int[Array, "B E"],
    seen: Bool[Array, "B V"],
) -> tuple[Sequences, Chosen]:
    """Chooses the first token of each sequence from the logits after its prompt.

    Args:
        logits: logits after each prompt's last token.
        state: state after the prompts; donated.
        sampling: how tokens are chosen.
        limit: most tokens of each sequence, at least 1.
        end_ids: tokens that end each sequence.
        seen: tokens of the prompts; donated.

    Returns:
        (the sequences, their first tokens).
    """
    count = jnp.zeros(logits.shape[:1], jnp.int32)
    sequences = Sequences(
        state=state,
        token=count,
        count=count,
        limit=limit,
        active=limit > 0,
        sampling=sampling,
        end_ids=end_ids,
        seen=seen,
    )
    sequences, token, log_probability, active = _choose(logits, sequences)
    return sequences, Chosen(token[None], log_probability[None], active[None])


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("sequences",))
def decode(
    model: NHALanguageModel, params: Any, sequences: Sequences, steps: int | Int[Array, ""]
) -> tuple[Sequences, Chosen]:
    """Generates up to `steps` tokens of each sequence in one program; the sequences are donated.

    It ends early where no sequence is active. A sequence that has ended is fed padding, which
    leaves its state as it is.

    Args:
        model: the model (static).
        params: its parameters.
        sequences: as from `begin`.
        steps: tokens to generate in this call, from 1 to MAX_STEPS; data, not compiled in.

    Returns:
        (the sequences, the tokens chosen, with MAX_STEPS rows).
    """
    batch = sequences.token.shape[0]
    chosen = Chosen(
        jnp.zeros((MAX_STEPS, batch), jnp.int32),
        jnp.zeros((MAX_STEPS, batch), jnp.float32),
        jnp.zeros((MAX_STEPS, batch), bool),
    )

    def goes_on(carry: tuple[jax.Array, Sequences, Chosen]) -> jax.Array:
        step, sequences, _ = carry
        return (step < steps) & jnp.any(sequences.active)

    def advance(
        carry: tuple[jax.Array, Sequences, Chosen],
    ) -> tuple[jax.Array, Sequences, Chosen]:
        step, sequences, chosen = carry
        logits, state = _feed(model, params, sequences.state, sequences.token, sequences.active)
        sequences, *new = _choose(logits, dataclasses.replace(sequences, state=state))
        chosen = Chosen(*(rows.at[step].set(row) for rows, row in zip(chosen, new, strict=True)))
        return step + 1, sequences, chosen

    _, sequences, chosen = jax.lax.while_loop(
        goes_on, advance, (jnp.zeros((), jnp.int32), sequences, chosen)
    )
    return sequences, chosen


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def append(
    model: NHALanguageModel, params: Any, state: LanguageModelState, token: Int[Array, " B"]
) -> LanguageModelState:
    """The state with one more token in each sequence, to go on from; the state is donated."""
    _, state = _feed(model, params, state, token, jnp.ones(token.shape, bool))
    return state


def _feed(
    model: NHALanguageModel,
    params: Any,
    state: LanguageModelState,
    token: Int[Array, " B"],
    rows: Bool[Array, " B"],
) -> tuple[Float[Array, "B V"], LanguageModelState]:
    """Gives the model a token of some rows: (logits of the next, state)."""
    segment_ids = jnp.where(rows, jnp.maximum(state.segment_id, 1), 0)[:, None]
    results: Any = model.apply(
        {"params": params},
        token[:, None],
        segment_ids=segment_ids,
        windows=state.windows,
        state=state,
        return_state=True,
    )
    logits, state = results
    return logits[:, 0].astype(jnp.float32), state


def _choose(
    logits: Float[Array, "B V"], sequences: Sequences
) -> tuple[Sequences, jax.Array, jax.Array, jax.Array]:
    """Chooses a token for each active sequence: (sequences, token, its log probability, active)."""
    active, seen = sequences.active, sequences.seen
    token, log_probability = choose_tokens(logits, sequences.sampling, sequences.count, seen)
    token = jnp.where(active, token, sequences.token)
    count = sequences.count + active
    ends = jnp.any(token[:, None] == sequences.end_ids, axis=-1)
    sequences = dataclasses.replace(
        sequences,
        token=token,
        count=count,
        active=active & ~ends & (count < sequences.limit),
        seen=seen.at[jnp.arange(token.shape[0]), token].max(active),
    )
    return sequences, token, log_probability, active
