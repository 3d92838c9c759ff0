"""Compiles all kernels of one call for a GPU that need not be there; prints what they need.

python -m tests.ops.triton_compiler [dtype] [H] [V] [M] [capability]
"""

import sys

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas.triton import attention, launch

TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
# Bytes of shared memory that a program may have.
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


def compiled(kernel, operands, outputs, constants, num_warps, num_stages, capability):
    """The compiled kernel, its pointers taken to be aligned as JAX aligns them."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    attributes = {}
    for name, x in zip(names, [*operands, *outputs], strict=True):
        signature[name] = "i32" if isinstance(x, int) else TYPES[jnp.dtype(x.dtype).name]
        if not isinstance(x, int):
            attributes[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def launches(dtype, key_width, value_width, num_slots):
    """All launches of a forward and backward pass."""
    found = []

    def record(kernel, grid, operands, outputs, constants, *, num_warps, num_stages):
        del grid
        found.append((kernel, operands, outputs, constants, num_warps, num_stages))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    launch.launcher = record
    B, T, N, K = 1, 256, 4, 2
    queries = jax.ShapeDtypeStruct((B, T, N, key_width), dtype)
    keys = jax.ShapeDtypeStruct((B, T, K, key_width), dtype)
    values = jax.ShapeDtypeStruct((B, T, K, value_width), dtype)
    gates = jax.ShapeDtypeStruct((B, T, K, num_slots), jnp.float32)

    def loss(*arrays):
        out, share, _ = attention(
            *arrays,
            jnp.zeros((B, T), jnp.int32),
            None,
            window=64,
            scale=0.125,
            sink=False,
            with_slots=False,
            use_slots=True,
        )
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(share)

    gradient = jax.grad(loss, argnums=tuple(range(6)))
    jax.eval_shape(gradient, queries, keys, values, gates, queries, keys)
    return found


def main(dtype="bfloat16", key_width=32, value_width=32, num_slots=16, capability=90):
    """Compiles and prints each kernel once; fails where one needs more than an SM has."""
    seen = set()
    for kernel, operands, outputs, constants, warps, stages in launches(
        jnp.dtype(dtype), int(key_width), int(value_width), int(num_slots)
    ):
        if kernel.__name__ in seen:
            continue
        seen.add(kernel.__name__)
        result = compiled(kernel, operands, outputs, constants, warps, stages, int(capability))
        shared = result.metadata.shared
        print(f"{kernel.__name__}: {warps} warps, {stages} stages, {shared} bytes shared")
        if shared > SHARED[int(capability)]:
            raise SystemExit(f"{kernel.__name__} needs {shared} bytes of shared memory")


if __name__ == "__main__":
    main(*sys.argv[1:])
