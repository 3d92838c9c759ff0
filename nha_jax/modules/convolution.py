"""Short causal depthwise convolution over time that stays inside segments."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Int

from nha_jax.modules.partitioning import partitioned_parameter


def _uniform_over_taps(key: jax.Array, shape: tuple[int, ...], dtype: Dtype) -> jax.Array:
    """Uniform within 1/sqrt(taps): each channel is a sum over its taps only."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class ShortConvolution(nn.Module):
    """Every channel becomes a learned weighted sum of its last `width` tokens, its own included.

    Only tokens of the same segment count; before a segment's first token there are zeros. There is
    no bias and no activation. Products and sums are float32.

    Attributes:
        width: number of taps, the token itself included.
        axis_name: logical partitioning name of the head axis.
        param_dtype: dtype of the kernel.
        kernel_init: initialiser of the kernel [width, N, H]; its last tap is the token itself.
    """

    width: int
    axis_name: str = "heads"
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = _uniform_over_taps

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T N H"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        tail: Float[Array, "B P N H"] | None = None,
        tail_segment_id: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B P N H"]]:
        """Convolves `x` in time.

        Args:
            x: heads of queries, keys or values.
            segment_ids: ids from 1, 0 = padding; None means that every token is of one segment,
                that of the tail.
            tail: the inputs of the last P = width - 1 tokens before `x`, oldest first, zeros where
                the segment had fewer; None means zeros.
            tail_segment_id: the segment of the tail. Needed where both `tail` and `segment_ids` are
                given.

        Returns:
            The convolved heads, in the dtype of `x`, and the tail to go on with. Padding leaves the
            tail as it was.
        """
        kernel = partitioned_parameter(
            self,
            "kernel",
            self.kernel_init,
            (None, self.axis_name, "head_dim"),
            (self.width, *x.shape[2:]),
            self.param_dtype,
        )
        batch, length = x.shape[:2]
        past = self.width - 1
        if tail is None:
            tail = jnp.zeros((batch, past, *x.shape[2:]), x.dtype)
        inputs = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
        ids = None
        if segment_ids is not None:
            if tail_segment_id is None:
                tail_segment_id = jnp.zeros((batch,), segment_ids.dtype)
            tail_ids = jnp.broadcast_to(tail_segment_id[:, None], (batch, past))
            ids = jnp.concatenate([tail_ids.astype(segment_ids.dtype), segment_ids], axis=1)
            # A segment is an unbroken run of its id: the id alone may come back in the same row.
            begins = jnp.concatenate([ids[:, :1] > 0, ids[:, 1:] != ids[:, :-1]], axis=1)
            ids = jnp.where(ids > 0, jnp.cumsum(begins, axis=1), 0)

        wide = jnp.promote_types(x.dtype, jnp.float32)
        out = jnp.zeros(x.shape, wide)
        for tap in range(self.width):
            product = inputs[:, tap : tap + length].astype(wide) * kernel[None, None, tap].astype(
                wide
            )
            if ids is not None:
                same = ids[:, tap : tap + length] == ids[:, past:]
                product = jnp.where(same[..., None, None], product, 0)
            out = out + product
        return out.astype(x.dtype), _next_tail(inputs, ids, past)


def _next_tail(
    inputs: Float[Array, "B S N H"], ids: Int[Array, "B S"] | None, past: int
) -> Float[Array, "B P N H"]:
    """The last `past` inputs of the current segment, zeros where it has fewer."""
    total = inputs.shape[1]
    if ids is None:
        return inputs[:, total - past :]
    # The current segment is that of the last real token; where the row is all padding, the tail's.
    steps = jnp.arange(total)[None]
    real = (ids > 0) | (steps < past)
    last = jnp.max(jnp.where(real, steps, 0), axis=1)
    rows = last[:, None] - jnp.arange(past - 1, -1, -1)[None]
    current = jnp.take_along_axis(ids, last[:, None], axis=1)
    same = jnp.take_along_axis(ids, rows, axis=1) == current
    tail = jnp.take_along_axis(inputs, rows[..., None, None], axis=1)
    return jnp.where(same[..., None, None], tail, 0)
