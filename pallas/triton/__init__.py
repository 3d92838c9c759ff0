"""Triton kernels of the operator, called through jax-triton.

A family exports `unsupported` and `attention`; `nha_jax.ops.kernels` calls them.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas.triton.operator import attention

DTYPES = ("bfloat16", "float16", "float32")


def unsupported(
    *,
    dtype: DTypeLike,
    num_heads: int,
    num_kv_heads: int,
    key_width: int,
    value_width: int,
    num_slots: int,
) -> str | None:
    """One clause that says why these inputs cannot run here; None where they can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"the kernels take {', '.join(DTYPES)}, not {jnp.dtype(dtype).name}"
    for name, width in (("key", key_width), ("value", value_width)):
        if width > 256:
            return f"{name} heads are at most 256 wide, but these are {width}"
    if num_slots > 128:
        return f"at most 128 slots fit a tile, but there are {num_slots}"
    return None


__all__ = ["attention", "unsupported"]
