"""Parameters that carry the logical names of their axes."""

from typing import Any

import flax.linen as nn
import jax
from flax.typing import Dtype, Initializer


def partitioned_parameter(
    module: nn.Module,
    name: str,
    init: Initializer,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    dtype: Dtype,
) -> jax.Array:
    """Declares a parameter of `module` with one logical name an axis.

    The names ("vocab", "embed", "heads", "kv_heads", "head_dim", "slots", "mlp"; "layers" is added
    where layers are stacked) become mesh axes by whatever `nn.logical_axis_rules` say.
    """
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)
    return value
