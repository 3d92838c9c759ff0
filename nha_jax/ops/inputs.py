"""What an implementation of the operator is handed: checked, rotated, with defaults filled in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from nha_jax.ops.state import NHAState


@dataclasses.dataclass(frozen=True)
class OperatorInputs:
    """One call of the operator after validation (letters as in DESIGN section 1).

    All arrays are 0 at padding.

    Attributes:
        query: [B, T, N, H], rotated.
        key: [B, T, K, H], rotated.
        value: [B, T, K, V].
        log_gate: [B, T, K, M].
        slot_query: [B, T, N, H].
        slot_key: [B, T, K, H].
        segment_ids: [B, T] int32; 0 is padding.
        window: A static integer, None for full attention, or an int32 scalar tracer.
        scale: Factor on all logits.
        sink: True for `empty_slots="sink"`.
        state: Where to go on from, or None.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K V"]
    log_gate: Float[Array, "B T K M"]
    slot_query: Float[Array, "B T N H"]
    slot_key: Float[Array, "B T K H"]
    segment_ids: Int[Array, "B T"]
    window: int | None | Array
    scale: float | Array
    sink: bool
    state: NHAState | None

    @property
    def window_is_static(self) -> bool:
        """Whether the window is known when the program is traced."""
        return self.window is None or isinstance(self.window, int)

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """float32, or float64 for float64 inputs (DESIGN section 5)."""
        return jnp.promote_types(self.query.dtype, jnp.float32)

    @property
    def precision(self) -> jax.lax.Precision:
        """Precision of the products, by the dtype of the inputs (`product_precision`)."""
        return product_precision(self.query.dtype)


def product_precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Products of float32 inputs are true float32 on every device, never TF32 in silence.

    Products of 16-bit inputs may run in TF32 on a GPU: their rounding is coarser than that.
    """
    narrow = jnp.finfo(dtype).bits < 32
    return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST


def is_concrete(x) -> bool:
    """True where values can be looked at, so that wrong ones can be refused."""
    return not isinstance(x, jax.core.Tracer)


def capacity_error(length: np.ndarray, capacity: int) -> ValueError:
    """The error for sequences that come to `length` tokens in a state of `capacity` rows."""
    return ValueError(
        f"The state of a full-attention layer holds at most {capacity} tokens (its capacity), but "
        f"the call brings a sequence to {int(length.max())}: make the state with a larger capacity."
    )


def result_dtypes(inputs: OperatorInputs) -> tuple[DTypeLike, DTypeLike]:
    """Dtypes of the returned state's window and slot arrays: an initial state's if there is one."""
    if inputs.state is not None:
        return inputs.state.window_key.dtype, inputs.state.slot_key.dtype
    return inputs.key.dtype, inputs.accumulator_dtype
