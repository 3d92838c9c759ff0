"""What the forward and the backward pass hand to each other."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas.triton.configs import KernelConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """Static facts of one call.

    Attributes:
        scale: Factor on all logits.
        sink: Whether empty slots take part as zeros.
        slots: Whether slots exist at all: whether they are read or the final ones asked for.
        with_slots: Whether the final slots are returned.
        window: The window where it is static, else None; the kernels read it from an array.
        config: Tiles.
    """

    scale: float
    sink: bool
    slots: bool
    with_slots: bool
    window: int | None
    config: KernelConfig


class Inputs(NamedTuple):
    """The differentiable arrays; letters as in `attention`."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    log_gate: Float[Array, "B S K M"]
    slot_query: Float[Array, "B T N H"]
    slot_key: Float[Array, "B S K H"]
    initial_slots: Float[Array, "B K M HV"] | None


class Memory(NamedTuple):
    """The slots in chunks, as the forward pass leaves them for the gradients."""

    before: Float[Array, "B n K M HV"]
    kept: Float[Array, "B n K M"]
    factors: Float[Array, "B n K L C M"]
    exact: Int[Array, "B n K"]


class Sizes(NamedTuple):
    """All sizes of one call."""

    B: int
    T: int
    P: int
    N: int
    K: int
    H: int
    V: int
    M: int
    chunks: int

    @classmethod
    def of(cls, inputs: Inputs, config: KernelConfig) -> "Sizes":
        """Those of a call's inputs."""
        B, T, N, H = inputs.query.shape
        S, K, V = inputs.value.shape[1:]
        return cls(B, T, S - T, N, K, H, V, inputs.log_gate.shape[3], -(-T // config.chunk))


def operand_dtype(dtype) -> Any:
    """What states and decay factors are stored in: bfloat16 for such inputs, else float32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
