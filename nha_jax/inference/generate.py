"""Text from a language model: one pass over the prompt, then one token at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from nha_jax.models.language_model import LanguageModelState, NHALanguageModel


def generate(
    model: NHALanguageModel,
    params: Any,
    prompt: Int[Array, "B P"],
    num_tokens: int,
    key: jax.Array,
    *,
    temperature: float = 1.0,
) -> Int[Array, "B S"]:
    """Continues prompts of one length by sampling.

    Args:
        model: the model; its own windows are used.
        params: its parameters.
        prompt: int32 token ids [B, P], P at least 1, without padding.
        num_tokens: tokens to generate, S, at least 1.
        key: random key; the same key gives the same continuation.
        temperature: the logits are divided by it; 0 takes the likeliest token.

    Returns:
        The new tokens [B, S] int32, without the prompt.

    Raises:
        ValueError: if the prompt is empty, or num_tokens or the temperature are out of range.
    """
    prompt = jnp.asarray(prompt, jnp.int32)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"prompt has shape {prompt.shape}, but must be [B, P] with at least one token a row."
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}, but must be 1 or more.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, but must be 0 or more.")
    return _generate(model, params, prompt, num_tokens, key, temperature)


@functools.partial(jax.jit, static_argnames=("model", "num_tokens", "temperature"))
def _generate(
    model: NHALanguageModel,
    params: Any,
    prompt: jax.Array,
    num_tokens: int,
    key: jax.Array,
    temperature: float,
) -> jax.Array:
    variables = {"params": params}

    def sample(logits: jax.Array, index: jax.Array | int) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        step_key = jax.random.fold_in(key, index)
        return jax.random.categorical(step_key, logits / temperature, axis=-1).astype(jnp.int32)

    def advance(tokens: jax.Array, state: LanguageModelState) -> tuple[Any, LanguageModelState]:
        results: Any = model.apply(variables, tokens, state=state, return_state=True)
        logits, next_state = results
        return logits[:, -1], next_state

    empty = model.init_state(prompt.shape[0], capacity=prompt.shape[1] + num_tokens)
    logits, state = advance(prompt, empty)
    first = sample(logits, 0)

    def step(
        carry: tuple[jax.Array, LanguageModelState], index: jax.Array
    ) -> tuple[tuple[jax.Array, LanguageModelState], jax.Array]:
        logits, state = advance(carry[0][:, None], carry[1])
        token = sample(logits, index)
        return (token, state), token

    _, rest = jax.lax.scan(step, (first, state), jnp.arange(1, num_tokens))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
