"""What all kernels of this family share: tile size, layouts, and products of tiles."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Tokens of a chunk, keys of a window tile, and slots of a slot tile.
TILE = 64
LOG2E = math.log2(math.e)

MATRIX = plgpu.Layout.WGMMA
# One value a row, one value a column of a MATRIX tile.
BY_ROW = MATRIX.reduce(1)
BY_COLUMN = MATRIX.reduce(0)

SHARED_MEMORY_BYTES = 227 * 1024
# Vectors, barriers, and what the compiler takes to reduce rows.
RESERVED_BYTES = 8 * 1024

# A chunk whose gates sum to less than this takes the exact form (`gates`): beyond it the factors
# exp(+-sum/2) of the one-reference form leave the range, or the precision, of the input dtype.
ONE_REFERENCE_LIMIT = {jnp.dtype(jnp.bfloat16): -100.0, jnp.dtype(jnp.float16): -12.0}
# Retention below exp(-25) cannot be told from 0 beside 1 in float32; the floor keeps the split of
# gates into two bfloat16 parts exact enough (an error of 25 * 2**-17 in the exponent).
GATE_FLOOR = -25.0


def tile_ref(shape: tuple[int, ...], dtype) -> Any:
    """Shared memory for tiles, swizzled as TMA and the tensor cores want it."""
    columns = 128 // jnp.dtype(dtype).itemsize
    if shape[-1] % columns:
        return plgpu.SMEM(shape, dtype)
    transforms: Any = [plgpu.TilingTransform, plgpu.SwizzleTransform]
    transforms = (transforms[0]((8, columns)), transforms[1](128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def accumulator(columns: int, rows: int = TILE) -> Any:
    """Registers that products add up in."""
    return plgpu.ACC((rows, columns), jnp.float32)


def indices(shape: tuple[int, int] = (TILE, TILE)) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a tile."""
    return (
        plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX),
        plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX),
    )


def load(ref, layout=MATRIX) -> jax.Array:
    """A shared-memory tile or vector as a register value."""
    return plgpu.load(ref, layout=layout)


def over_rows(vector, shape=(TILE, TILE)) -> jax.Array:
    """A value a row, spread over the columns."""
    return jax.lax.broadcast_in_dim(vector, shape, [0])


def over_columns(vector, shape=(TILE, TILE)) -> jax.Array:
    """A value a column, spread over the rows."""
    return jax.lax.broadcast_in_dim(vector, shape, [1])


def multiply(accumulated, left, right, spare) -> None:
    """Adds left @ right; `left` is a register value, `right` a shared-memory tile.

    `spare` is a shared-memory tile for `left` where it may not come from registers, else None.
    """
    if spare is None:
        plgpu.wgmma(accumulated, left, right)
        # One at a time: with two register operands under way, sums went wrong on an H200 in some
        # compilations (`gates.masked_sums`), as if registers of the first were used again.
        plgpu.wgmma_wait(0)
    else:
        spare[...] = left
        plgpu.commit_smem()
        plgpu.wgmma(accumulated, spare, right)


def product(left, right, spare, rows: int = TILE) -> jax.Array:
    """The product left @ right as a float32 register value."""

    def run(accumulated):
        multiply(accumulated, left, right, spare)
        return accumulated[...]

    columns = right.shape[-1]
    return pl.run_scoped(run, accumulator(columns, rows))


def remainder(index, divisor: int) -> jax.Array:
    """`index % divisor` for an index that is not negative, in int32 with 64-bit types on too."""
    return jax.lax.rem(index, jnp.int32(divisor))


def loop(count, body, start) -> Any:
    """`fori_loop` from 0 to `count` with an int32 counter."""
    return jax.lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, start)


def launch(body, name, *, inputs, outputs, scratch, grid, warpgroups=1) -> dict[str, jax.Array]:
    """Runs a kernel whose body takes one namespace of references: inputs, outputs, scratch.

    Args:
        body: Called once in every warpgroup of every program.
        name: Of the kernel, for profilers.
        inputs: Arrays by name.
        outputs: Shapes and dtypes by name.
        scratch: Shared memory and barriers by name.
        grid: Sizes by axis name.
        warpgroups: Per program; the axis is "warpgroup".

    Returns:
        The outputs, by name.
    """
    names = (*inputs, *outputs)

    def run(*refs, **buffers):
        body(SimpleNamespace(**dict(zip(names, refs, strict=True)), **buffers))

    results = plgpu.kernel(
        run,
        out_type=list(outputs.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def spare_tiles(config, count, dtype, warpgroups=1) -> dict[str, Any]:
    """Scratch for `multiply`'s left operands, `count` under way at once in a warpgroup."""
    if config.register_operands:
        return {}
    return {"spares": tile_ref((warpgroups, count, TILE, TILE), dtype)}


def spare(ref, index, worker=0) -> Any:
    """One of `spare_tiles`, or None where operands go from registers."""
    return ref.spares.at[worker, index] if hasattr(ref, "spares") else None
