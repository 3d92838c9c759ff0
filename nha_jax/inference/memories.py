"""What a model's memories do with a text: who reads the slots, and how long they keep."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from nha_jax.inference.sequences import layer_bytes
from nha_jax.models.language_model import NHALanguageModel


class Memories(NamedTuple):
    """What was seen of one text.

    Attributes:
        slot_share: [L, N, T], share of each query's softmax that falls on slots.
        half_life: [L, K, M], tokens after which half of what a slot held is left, at the mean of
            its gate over the text: ln 2 / -mean(log_gate). Every token that leaves the window
            counts as one, so that the window comes on top of it.
    """

    slot_share: Float[np.ndarray, "L N T"]
    half_life: Float[np.ndarray, "L K M"]


def look_at_memories(
    model: NHALanguageModel, params: Any, tokens: Int[np.ndarray, " T"]
) -> Memories:
    """Runs a text through a model, with the model's windows.

    Args:
        model: the model.
        params: its parameters.
        tokens: ids of the text, at least one.

    Raises:
        ValueError: the text is empty.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"tokens has shape {tokens.shape}, but must be [T] with at least one.")

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        results: Any = model.apply(
            {"params": params},
            tokens[None],
            return_traces=True,
            logits_at=jnp.zeros((1, 1), jnp.int32),
        )
        traces = results[1]
        return {
            "slot_share": jnp.moveaxis(traces["slot_share"][:, 0], 1, 2),
            "decay": -jnp.mean(traces["log_gate"][:, 0], axis=1),
        }

    found = jax.device_get(run(params, tokens))
    # A gate that never closes at all keeps for ever.
    with np.errstate(divide="ignore"):
        return Memories(found["slot_share"], np.log(2) / found["decay"])


def state_bytes(model: NHALanguageModel, context: int) -> tuple[list[int], list[int]]:
    """Bytes of each layer's state for one sequence of `context` tokens.

    Args:
        model: the model.
        context: tokens that layers of full attention have room for.

    Returns:
        (with the model's windows, with full attention in every layer).
    """

    def sizes(windows: Any) -> list[int]:
        return layer_bytes(
            jax.eval_shape(lambda: model.init_state(1, windows=windows, capacity=context))
        )

    return sizes(None), sizes("full")
