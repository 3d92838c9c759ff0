"""Tile sizes of the kernels: a frozen dataclass, and what each shape gets."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Tiles and launch options of one call.

    Attributes:
        chunk: Tokens C of a chunk, and rows of a key block: a power of two from 16 to 128.
        heads: Query heads of a group, at most, that one program of the output kernel goes
            through; a power of two.
        warps: Warps of a program of the output and of the query gradients: 4 or 8.
        heavy_warps: Warps of the kernels that keep more tiles: contributions and the rest of the
            gradients: 4 or 8.
        stages: Loads in flight in pipelined loops, from 1 to 4.
        width: Columns of keys and values that the slot kernels hold at a time: a power of two.
        scan_rows: Slots that one program of a scan carries: a power of two.
        scan_columns: Columns of them: a power of two.
        limit: Chunks whose gates sum to less than -limit in some slot take the exact path.
    """

    chunk: int = 64
    heads: int = 4
    warps: int = 4
    heavy_warps: int = 8
    stages: int = 2
    width: int = 128
    scan_rows: int = 4
    scan_columns: int = 128
    limit: float = 100.0

    def __post_init__(self):
        for name, low, high in (
            ("chunk", 16, 128),
            ("heads", 1, 8),
            ("width", 16, 256),
            ("scan_rows", 1, 16),
            ("scan_columns", 16, 512),
        ):
            size = getattr(self, name)
            if not low <= size <= high or size & (size - 1):
                raise ValueError(
                    f"KernelConfig: {name} must be a power of two from {low} to {high}, but was "
                    f"{size}."
                )
        for name in ("warps", "heavy_warps"):
            if getattr(self, name) not in (4, 8):
                raise ValueError(
                    f"KernelConfig: {name} must be 4 or 8, but was {getattr(self, name)}."
                )
        if not 1 <= self.stages <= 4:
            raise ValueError(f"KernelConfig: stages must be from 1 to 4, but was {self.stages}.")
        if not 0 < self.limit <= 120:
            raise ValueError(
                f"KernelConfig: limit must be above 0 and at most 120, but was {self.limit}."
            )

    @property
    def levels(self) -> int:
        """Halvings of a chunk down to single tokens."""
        return self.chunk.bit_length() - 1


def block(width: int) -> int:
    """The tile that holds `width` elements: a power of two, at least 16 for the tensor cores."""
    return max(16, 1 << (width - 1).bit_length())


def precision(dtype: DTypeLike) -> str:
    """How products of `dtype` run: on bfloat16, or on float32 as one TF32 product or as three.

    float16 runs as one TF32 product, which keeps all its digits, because decay factors and
    gradients do not fit float16's range.
    """
    return {"bfloat16": "bf16", "float16": "tf32", "float32": "tf32x3"}[jnp.dtype(dtype).name]


def choose(dtype: DTypeLike, key_width: int, value_width: int, num_slots: int) -> KernelConfig:
    """The tiles for one shape: what fits the registers and shared memory of one SM."""
    wide = max(key_width, value_width) > 128
    if precision(dtype) == "bf16":
        if not wide and num_slots <= 64:
            return KernelConfig(heavy_warps=4)
        # All tiles of a chunk would not fit: they are loaded anew for each head, in slices.
        return KernelConfig(warps=8 if wide else 4, stages=1, width=64)
    # The sums of gates are exponents: at 30 their rounding is still below 1e-5.
    limit = 30.0 if precision(dtype) == "tf32x3" else 100.0
    return KernelConfig(chunk=32, warps=8 if wide else 4, stages=1, width=32, limit=limit)
