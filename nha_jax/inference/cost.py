"""What a token costs to decode: bytes that move and floating point operations, by layer windows."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import count_parameters
from nha_jax.ops.windows import Window


@dataclasses.dataclass(frozen=True)
class DecodeCost:
    """Decoding one token of one sequence that has `context` tokens.

    What the method needs, not what an implementation spends.

    Attributes:
        state_bytes: keys and values that are read, and slots that are read and written back.
        weight_bytes: parameters that are read; a batch of sequences shares them.
        flops: floating point operations, those with the parameters included.
    """

    state_bytes: int
    weight_bytes: int
    flops: int


def decode_cost(config: NHAConfig, windows: Sequence[Window], context: int) -> DecodeCost:
    """Costs of decoding one token.

    Args:
        config: the model; its own windows do not matter.
        windows: one window a layer, None for full attention.
        context: tokens before the one that is decoded, itself included.

    Raises:
        ValueError: the context is not positive.
    """
    if context < 1:
        raise ValueError(f"context is {context}, but must be 1 or more.")
    assert config.value_width is not None
    itemsize = jnp.dtype(config.dtype).itemsize
    parameters = count_parameters(config)
    matrices = parameters - (0 if config.tie_embeddings else config.vocab_size * config.width)
    widths = config.key_width + config.value_width
    state_bytes = flops = 0
    for window in windows:
        rows = context if window is None else min(window, context)
        slots = 0 if window is None or window >= context else config.num_slots
        state_bytes += rows * config.num_kv_heads * widths * itemsize
        state_bytes += 2 * slots * config.num_kv_heads * widths * 4  # float32, read and written
        # A product and a sum for each number of a key and of a value.
        flops += 2 * config.num_heads * (rows + slots) * widths
        flops += 3 * config.num_kv_heads * slots * widths
    return DecodeCost(state_bytes, matrices * itemsize, flops + 2 * matrices)
