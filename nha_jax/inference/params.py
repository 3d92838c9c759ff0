"""Parameters as inference wants them: each in the dtype in which it is used."""

from typing import Any

import jax
import jax.numpy as jnp

from nha_jax.models.config import NHAConfig

# What the model rounds to its compute dtype before every use. Norm scales and the kernels of short
# convolutions are used in float32.
_ROUNDED = ("kernel", "bias", "embed", "head")


def cast_params(params: Any, config: NHAConfig) -> Any:
    """Rounds once what the model would round at every step; the logits are the same bit for bit.

    A step of decoding reads every parameter: in bfloat16 that is half of what it is in float32.

    Args:
        params: parameters of an `NHALanguageModel`.
        config: its configuration; `config.dtype` is the compute dtype.

    Returns:
        The parameters; those that are not matrices of products keep their dtype.
    """
    dtype = jnp.dtype(config.dtype)

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [str(getattr(entry, "key", entry)) for entry in path]
        convolution = any(name.endswith("_convolution") for name in names)
        return leaf.astype(dtype) if names[-1] in _ROUNDED and not convolution else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
