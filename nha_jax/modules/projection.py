"""A linear map whose kernel keeps head and width as separate axes."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike
from jaxtyping import Array, Float

from nha_jax.modules.partitioning import partitioned_parameter


class Projection(nn.Module):
    """Maps the last axes of the input to `features`, such as [D] to [heads, width] and back.

    Separate axes carry separate logical names, so that heads can be split over devices. The kernel
    is initialised as the matrix it is, inputs by outputs. (`nn.DenseGeneral` does the same, but
    applies the names to that matrix, which fails under a mesh.)

    Attributes:
        features: sizes of the output axes.
        axes: logical names of the kernel's axes, those of the input first.
        use_bias: whether a bias is added; it has the output axes.
        dtype: dtype of the operands; None promotes those of the input and the parameters.
        output_dtype: dtype in which the products are summed and returned; None is that of the
            operands (on accelerators sums are float32 inside a product all the same).
        param_dtype: dtype of the parameters.
        kernel_init: initialiser of the kernel, called with a matrix's shape.
        bias_init: initialiser of the bias.
        precision: precision of the product.
    """

    features: tuple[int, ...]
    axes: tuple[str, ...]
    use_bias: bool = False
    dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    precision: PrecisionLike = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the map to the last axes of `x`, as many as `axes` names for the input."""
        contracted = len(self.axes) - len(self.features)
        leading = x.ndim - contracted
        inputs = x.shape[leading:]

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype) -> jax.Array:
            matrix = (math.prod(inputs), math.prod(self.features))
            return self.kernel_init(key, matrix, dtype).reshape(shape)

        shape = (*inputs, *self.features)
        kernel = partitioned_parameter(self, "kernel", init, self.axes, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = partitioned_parameter(
                self,
                "bias",
                self.bias_init,
                self.axes[contracted:],
                self.features,
                self.param_dtype,
            )
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        contracting = (tuple(range(leading, x.ndim)), tuple(range(contracted)))
        out = jax.lax.dot_general(
            x,
            kernel,
            (contracting, ((), ())),
            precision=self.precision,
            preferred_element_type=self.output_dtype,
        )
        return out if bias is None else out + jnp.expand_dims(bias, tuple(range(leading)))
