"""Runs Triton kernels on a CPU: the same kernels and the same launches, in Triton's interpreter.

The interpreter takes torch tensors; `_Buffer` is as much of one as it asks for, over a NumPy array.
`tests/conftest.py` sets TRITON_INTERPRET before anything imports Triton.
"""

import dataclasses
import functools
import threading
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

# XLA calls back from several threads; the interpreter keeps the running program in globals.
_one_at_a_time = threading.Lock()


class _Storage:
    def __init__(self, array):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.array is self.array


class _Buffer:
    """A NumPy array that looks like a torch tensor to the interpreter."""

    def __init__(self, array):
        self.array = array
        self.dtype = _dtype(array.dtype.name)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return _Storage(self.array)

    def new_empty(self, _, device):
        assert device == "cpu"
        return _Buffer(self.array)

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def set_(self, storage, *_):
        self.array = storage.array


@dataclasses.dataclass(frozen=True)
class _Dtype:
    name: str

    def __str__(self):
        return self.name


@functools.cache
def _dtype(name):
    """One object a dtype, never freed: Triton remembers dtypes by their address."""
    return _Dtype(name)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product in float32; the interpreter's own takes the bits of bfloat16 for integers."""
    del self, input_precision, max_num_imprecise_acc

    def wide(x):
        if x.dtype.scalar == tl.bfloat16:
            return x.data.view(ml_dtypes.bfloat16).astype(np.float32)
        return x.data.astype(np.float32)

    return interpreter.TensorHandle(np.matmul(wide(a), wide(b)) + d.data, d.dtype.scalar)


_cast = interpreter.InterpreterBuilder.cast_impl


def _cast_rounding(self, src, dst_type):
    """A cast that rounds to bfloat16 as GPUs do; the interpreter's own cuts digits off."""
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        bits = src.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)
    return _cast(self, src, dst_type)


def _patched_once():
    """Triton's patching of its language, left out where it would only be done again.

    The interpreter patches anew at every call of one kernel function by another; that takes a third
    of its time.
    """
    patch, done = interpreter._patch_lang, set()

    def once(function):
        known = (tl, tl.core)
        seen = {id(x) for x in function.__globals__.values() if any(x is each for each in known)}
        if seen <= done:
            return None
        done.update(seen)
        return patch(function)

    return once


def interpreted(kernel, grid, operands, outputs, constants, *, num_warps, num_stages):
    """A launcher for `pallas.triton.launch`; memory that no program writes holds poison."""
    del num_warps, num_stages

    def run(*arrays):
        made = [_guarded(x) for x in arrays]
        results = [_guarded(np.empty(x.shape, x.dtype)) for x in outputs]
        for result in results:
            result.fill(_poison(result.dtype))
        given = iter(made)
        arguments = [x if isinstance(x, int) else _Buffer(next(given)) for x in (*operands,)]
        arguments += [_Buffer(x) for x in results]
        names = [name for name in kernel.arg_names if name not in constants]
        assert len(names) == len(arguments), (names, len(arguments))
        builder = interpreter.InterpreterBuilder
        with (
            _one_at_a_time,
            mock.patch.object(builder, "create_dot", _dot),
            mock.patch.object(builder, "cast_impl", _cast_rounding),
            mock.patch.object(interpreter, "_patch_lang", _patched_once()),
        ):
            kernel[grid](**dict(zip(names, arguments, strict=True)), **constants)
        for result in results:
            before, after = result.base[:_GUARD], result.base[-_GUARD:]
            for guard in (before, after):  # nothing is written past the end
                expected = np.full(_GUARD, _poison(result.dtype), result.dtype)
                np.testing.assert_array_equal(guard.view(np.uint8), expected.view(np.uint8))
        return [np.array(x) for x in results]

    arrays = [x for x in operands if not isinstance(x, int)]
    return jax.pure_callback(run, list(outputs), *arrays)


_GUARD = 256


def _poison(dtype):
    return -(2**30) if np.issubdtype(dtype, np.integer) else np.nan


def _guarded(x):
    """A copy between two stretches of poison, so that reading past an end shows in the results."""
    x = np.asarray(x)
    memory = np.full(x.size + 2 * _GUARD, _poison(x.dtype), x.dtype)
    inside = memory[_GUARD : _GUARD + x.size].reshape(x.shape)
    inside[...] = x
    return inside
