"""Key-value recall: pairs of tokens, then the keys again; the model is to say the values.

A test of memory that needs no data and no training: what is asked stood in the row, and how far
back it stood is known.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nha_jax.models.language_model import NHALanguageModel


class RecallTask(NamedTuple):
    """Rows `BOS k1 v1 k2 v2 ... q1 a1 q2 a2 ...`: every key is asked once, in another order.

    Attributes:
        tokens: [B, T] int32, T = 1 + 4 * pairs.
        places: [B, pairs] int32, of the queries; the answer is the token after each.
        answers: [B, pairs] int32.
    """

    tokens: Int[Array, "B T"]
    places: Int[Array, "B Q"]
    answers: Int[Array, "B Q"]


def make_recall_task(
    ids: np.ndarray, bos_id: int, *, rows: int, pairs: int, seed: int = 0
) -> RecallTask:
    """Draws rows.

    Args:
        ids: token ids that may be keys and values, at least as many as `pairs`.
        bos_id: the first token of each row.
        rows: number of rows (B).
        pairs: pairs in a row; their keys differ.
        seed: of the draw.

    Raises:
        ValueError: there are fewer ids than pairs.
    """
    if not 1 <= pairs <= len(ids):
        raise ValueError(
            f"pairs is {pairs}, but must be from 1 to {len(ids)}, the number of token ids."
        )
    rng = np.random.default_rng(seed)
    tokens = np.empty((rows, 1 + 4 * pairs), np.int32)
    answers = np.empty((rows, pairs), np.int32)
    for row in range(rows):
        keys, values = rng.permutation(ids)[:pairs], rng.choice(ids, pairs)
        order = rng.permutation(pairs)
        answers[row] = values[order]
        stated = np.stack([keys, values], axis=1).ravel()
        asked = np.stack([keys[order], values[order]], axis=1).ravel()
        tokens[row] = np.concatenate([[bos_id], stated, asked])
    places = np.broadcast_to(1 + 2 * pairs + 2 * np.arange(pairs, dtype=np.int32), answers.shape)
    return RecallTask(*map(jnp.asarray, (tokens, places, answers)))


def make_recall_step(
    model: NHALanguageModel,
) -> Callable[[Any, RecallTask, Int[Array, " L"]], dict[str, Float[Array, ""]]]:
    """Returns a pure function (params, task, windows) -> metrics, to be jitted.

    The windows are data. The metrics are "accuracy" (share of answers that are the likeliest token)
    and "nats" (mean surprise of an answer).
    """

    def recall_step(
        params: Any, task: RecallTask, windows: Int[Array, " L"]
    ) -> dict[str, Float[Array, ""]]:
        logits: Any = model.apply(
            {"params": params}, task.tokens, windows=windows, logits_at=task.places
        )
        log_probabilities = jax.nn.log_softmax(logits, axis=-1)
        told = jnp.take_along_axis(log_probabilities, task.answers[..., None], axis=-1)
        right = jnp.argmax(logits, axis=-1) == task.answers
        return {"accuracy": jnp.mean(right.astype(jnp.float32)), "nats": -jnp.mean(told)}

    return recall_step
