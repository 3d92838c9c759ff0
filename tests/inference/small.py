"""A small model with windows of every kind in it, random weights and prompts for it."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import NHALanguageModel

MIXED = NHAConfig(
    vocab_size=29,
    num_layers=4,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    key_width=4,
    value_width=6,
    feed_forward_width=24,
    num_slots=3,
    windows=(0, 8, 64, None),
    conv_width=3,
    qk_norm=True,
    dtype="float32",
)
MODEL = NHALanguageModel(MIXED)


@functools.cache
def params_of(config: NHAConfig, scale: float = 0.4) -> Any:
    """Random parameters, large enough that every token depends on what stands before it."""
    shapes = jax.eval_shape(
        NHALanguageModel(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32),
        nn.meta.unbox(shapes)["params"],
    )


def prompts_of(
    lengths: list[int], seed: int = 0, vocab_size: int = MIXED.vocab_size
) -> list[list[int]]:
    """One random prompt of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def relative_error(found: Any, expected: Any) -> float:
    """||found - expected|| / ||expected||."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
