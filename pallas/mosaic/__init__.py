"""Pallas kernels on the Mosaic GPU backend, for NVIDIA GPUs of the Hopper generation.

`attention` is the operator, differentiable; `unsupported` says what it does not take. There is no
decode step of its own: a step is one pass over the state without tensor-core tiles to fill, which
the other implementations serve.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas.mosaic.config import MosaicConfig
from pallas.mosaic.operator import attention
from pallas.mosaic.tiles import ONE_REFERENCE_LIMIT

MAX_WIDTH = 128
MAX_SLOTS = 128


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
    name = jnp.dtype(dtype).name
    if jnp.dtype(dtype) not in ONE_REFERENCE_LIMIT:
        # The tensor cores would take float32 as TF32, three decimal digits.
        return f"the kernels take bfloat16 and float16, not {name}"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads are no multiple of {num_kv_heads} kv heads"
    for kind, width in (("key", key_width), ("value", value_width)):
        if width > MAX_WIDTH:
            return f"{kind} heads are at most {MAX_WIDTH} wide, but these are {width}"
    if num_slots > MAX_SLOTS:
        return f"at most {MAX_SLOTS} slots fit a tile, but there are {num_slots}"
    return None


__all__ = ["MosaicConfig", "attention", "unsupported"]
