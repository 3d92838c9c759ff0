"""Generation is what one whole pass after the other gives, and repeats with its key."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.inference.generate import generate
from nha_jax.models.language_model import NHALanguageModel
from nha_jax.training.step import unbox
from tests.training.tiny import tiny_config

MODEL = NHALanguageModel(tiny_config(**{"model.num_layers": 2, "model.windows": "4,full@1"}).model)
PROMPT = np.asarray([[5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 1, 2, 3, 1]], np.int32)
TOKENS = 9


@pytest.fixture(scope="module")
def params() -> Any:
    init = jax.jit(lambda key: unbox(MODEL.init(key, jnp.zeros((1, 2), jnp.int32))))
    # Larger than trained weights, so that every token depends on what stands before it.
    return jax.tree.map(lambda leaf: 20 * leaf, init(jax.random.key(0))["params"])


def test_greedy_is_the_likeliest_token_of_whole_passes(params: Any) -> None:
    found = generate(MODEL, params, PROMPT, TOKENS, jax.random.key(0), temperature=0.0)
    assert found.shape == (2, TOKENS)
    whole = np.concatenate([PROMPT, np.asarray(found)], axis=1)
    logits = MODEL.apply({"params": params}, whole)
    expected = np.argmax(logits, axis=-1)[:, PROMPT.shape[1] - 1 : -1]
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found)) > 4


def test_samples_repeat_with_their_key_and_follow_the_temperature(params: Any) -> None:
    def sample(seed: int, temperature: float) -> np.ndarray:
        key = jax.random.key(seed)
        return np.asarray(generate(MODEL, params, PROMPT, TOKENS, key, temperature=temperature))

    np.testing.assert_array_equal(sample(1, 1.0), sample(1, 1.0))
    assert np.any(sample(1, 1.0) != sample(2, 1.0))


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "temperature", "message"),
    [
        (np.zeros((1, 0), np.int32), 1, 1.0, "prompt has shape (1, 0)"),
        (np.zeros(3, np.int32), 1, 1.0, "prompt has shape (3,)"),
        (PROMPT, 0, 1.0, "num_tokens is 0"),
        (PROMPT, 1, -1.0, "temperature is -1.0"),
    ],
)
def test_bad_arguments_are_refused(
    params: Any, prompt: np.ndarray, num_tokens: int, temperature: float, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(MODEL, params, prompt, num_tokens, jax.random.key(0), temperature=temperature)
