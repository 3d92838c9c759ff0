"""The one place that calls jax-triton, and that knows how its releases differ."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array

Shape = jax.ShapeDtypeStruct


def jax_triton_call(
    kernel: Any,
    grid: tuple[int, ...],
    operands: Sequence[Array | int],
    outputs: Sequence[Shape],
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    num_stages: int,
) -> Sequence[Array]:
    """Runs one kernel on the GPU: arrays and integers first, then pointers to the outputs.

    Args:
        kernel: A function decorated with `triton.jit`.
        grid: Programs along up to three axes.
        operands: Arrays and Python integers, in the order of the kernel's parameters.
        outputs: Shapes and dtypes of the outputs, whose pointers follow.
        constants: The kernel's `tl.constexpr` parameters by name.
        num_warps: Warps of one program.
        num_stages: Loads that loops are pipelined by.

    Returns:
        The outputs.
    """
    import jax_triton

    named = {_outputs_keyword(): list(outputs)}
    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        **named,
        **constants,
    )


@functools.cache
def _outputs_keyword() -> str:
    """`out_type` from jax-triton 0.4 on, `out_shape` before."""
    import jax_triton

    parameters = inspect.signature(jax_triton.triton_call).parameters
    return "out_type" if "out_type" in parameters else "out_shape"


# What runs a kernel; a test puts Triton's interpreter here.
launcher: Callable[..., Sequence[Array]] = jax_triton_call


def launch(*arguments: Any, **options: Any) -> Sequence[Array]:
    """Runs a kernel by the current `launcher`; see `jax_triton_call`."""
    return launcher(*arguments, **options)
