"""The gated feed-forward of a decoder layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike
from jaxtyping import Array, Float


class SwiGLU(nn.Module):
    """Feed-forward silu(x W_gate) * (x W_up) W_down, without biases.

    Attributes:
        hidden_width: width between the projections.
        dtype: dtype of the computation; None promotes that of the input and the parameters.
        param_dtype: dtype of the parameters.
        kernel_init: initialiser of the three matrices.
        precision: precision of the matrix products.
    """

    hidden_width: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    precision: PrecisionLike = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the feed-forward to every token."""

        def project(name: str, width: int, axes: tuple[str, str]) -> nn.Dense:
            return nn.Dense(
                width,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=nn.with_logical_partitioning(self.kernel_init, axes),
                precision=self.precision,
                name=name,
            )

        hidden = jax.nn.silu(project("gate", self.hidden_width, ("embed", "mlp"))(x))
        hidden = hidden * project("up", self.hidden_width, ("embed", "mlp"))(x)
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        return project("down", x.shape[-1], ("mlp", "embed"))(hidden)
