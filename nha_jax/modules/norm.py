"""Root-mean-square normalisation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float

from nha_jax.modules.partitioning import partitioned_parameter


class RMSNorm(nn.Module):
    """Divides the last axis by its root mean square and multiplies by a learned scale.

    Mean square, division and scale are computed in float32 (float64 for float64 inputs); only the
    result is rounded to `dtype`.

    Attributes:
        epsilon: added to the mean square.
        axis_name: logical partitioning name of the scale.
        dtype: dtype of the result; None keeps that of the input.
        param_dtype: dtype of the scale.
        scale_init: initialiser of the scale.
    """

    epsilon: float = 1e-6
    axis_name: str = "embed"
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    scale_init: Initializer = nn.initializers.ones_init()

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises `x` over its last axis."""
        scale = partitioned_parameter(
            self, "scale", self.scale_init, (self.axis_name,), (x.shape[-1],), self.param_dtype
        )
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
        out = wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale
        return out.astype(self.dtype or x.dtype)
