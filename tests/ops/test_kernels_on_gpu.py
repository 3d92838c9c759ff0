"""Both families of kernels on a GPU: the operator's whole suite, and what only a device shows.

`pytest -m gpu tests/ops/test_kernels_on_gpu.py --numprocesses=8`: most of the time is compilation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax import native_hybrid_attention
from nha_jax.ops import kernels
from tests.ops import oracle
from tests.ops.cases import Case
from tests.ops.operator_suite import (
    OperatorSuite,
    choose_cases,
    exact_gradients,
    scalar_loss,
)

pytestmark = pytest.mark.gpu

# Letters as in the design: tails, groups, padded widths and slots, windows of several tiles.
SIZES = {
    "groups-of-4": Case(window=64, T=257, N=8, K=2, H=128, V=128, M=64),
    "long-window": Case(window=300, T=600, B=1, H=64, V=128, M=24),
    "long-window-wide": Case(window=130, T=400, B=1, H=128, V=128, M=128),
    "40-slots": Case(window=32, T=200, B=1, N=3, K=1, H=96, V=32, M=40, hard_gates=True),
    "80-slots": Case(window=0, T=130, B=1, H=64, V=64, M=80),
    "100-slots": Case(window=16, T=129, H=32, V=64, M=100, segments=((60, 69), (-3, 100, 26))),
    "128-slots": Case(window=7, T=64, B=1, H=128, V=64, M=128, empty_slots="sink"),
    "full": Case(window=None, T=333, B=1, N=4, K=1, H=128, V=64, M=8),
    "hard-gates": Case(window=64, T=512, N=4, K=1, H=128, V=128, M=64, hard_gates=True),
    "one-token": Case(window=64, T=1, H=128, V=128, M=64),
    "16-tokens": Case(window=4, T=16, H=64, V=64, M=64),
}
WIDE_SIZES = {
    "256-wide": Case(window=32, T=130, B=1, H=256, V=256, M=64),
    "256-wide-128-slots": Case(window=40, T=100, B=1, H=256, V=160, M=128, hard_gates=True),
}


def pytest_generate_tests(metafunc):
    choose_cases(metafunc)
    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", metafunc.cls.sizes.values(), ids=metafunc.cls.sizes)


@pytest.fixture(autouse=True)
def the_family_runs_here(request):
    problem = kernels.missing(request.cls.implementation)
    if problem is not None:
        pytest.skip(problem)


class OnGpu(OperatorSuite):
    """The suite, and sizes that are too slow for a CPU."""

    sizes = SIZES

    def test_sizes(self, size):
        """Results and gradients against float64; bit for bit the same when run again."""
        arrays, options = size.arrays(self.dtype), size.options()
        expected = oracle.evaluate(**arrays, **options, window=size.window)

        @jax.jit
        def run(arrays):
            call = functools.partial(
                native_hybrid_attention,
                **options,
                window=size.window,
                return_slot_share=True,
                implementation=self.implementation,
            )
            gradients = jax.grad(scalar_loss)(
                arrays, options, size.window, implementation=self.implementation
            )
            return call(**arrays), gradients

        (out, share), gradients = found = run(arrays)
        self.close(out, expected.out)
        self.close(share, expected.slot_share)
        for name, exact in exact_gradients(size, self.dtype).items():
            self.gradients_close(gradients[name], exact)
        jax.tree.map(np.testing.assert_array_equal, found, run(arrays))

    def test_a_long_sequence_is_its_parts(self):
        """131,072 tokens and arrays beyond 2**31 elements, judged where it is cheap: at the end.

        With gates that forget within some thousand tokens, the last tokens' outputs are those of
        the last part of the sequence alone.
        """
        length, tail, heads = 131072, 4096, 136
        key = jax.random.key(0)
        query, keys, values = (
            jax.random.normal(k, (1, length, heads, 128), self.dtype)
            for k in jax.random.split(key, 3)
        )
        assert query.size > 2**31
        gate = jnp.full((1, length, heads, 8), -0.05, jnp.float32)

        @functools.partial(jax.jit, static_argnames="implementation")
        def run(arrays, implementation):  # what is compared is cut out inside: memory is short
            out = native_hybrid_attention(*arrays, window=64, implementation=implementation)
            return out[:, -64:, -2:]

        out = run((query, keys, values, gate), self.implementation)
        part = [x[:, -tail:, -2:] for x in (query, keys, values, gate)]
        expected = run([x.astype(jnp.float32) for x in part], "xla")
        self.close(out, expected)

    def test_nothing_is_read_or_written_past_the_end(self):
        """Rows of a batch are neighbours in memory: NaN in one is never seen by another."""
        case = Case(window=20, T=77, B=3, H=64, V=64, M=24)
        clean = case.arrays(self.dtype)
        poisoned = {name: x.at[jnp.array([0, 2])].set(jnp.nan) for name, x in clean.items()}

        @jax.jit
        def run(arrays):
            def loss(arrays):
                out = native_hybrid_attention(
                    **arrays, **case.options(), window=20, implementation=self.implementation
                )
                return jnp.sum(out[1].astype(jnp.float32)), out[1]

            return jax.grad(loss, has_aux=True)(arrays)

        gradients, out = run(poisoned)
        expected_gradients, expected = run(clean)
        np.testing.assert_array_equal(out, expected)
        for name, gradient in expected_gradients.items():
            np.testing.assert_array_equal(gradients[name][1], gradient[1])


class TestTriton(OnGpu):
    implementation = "triton"
    dtypes = (jnp.bfloat16, jnp.float16)
    sizes = SIZES | WIDE_SIZES


class TestTritonBfloat16(OnGpu):
    implementation = "triton"
    dtype = jnp.bfloat16
    dtypes = (jnp.float16,)
    sizes = SIZES | WIDE_SIZES


class TestPallas(OnGpu):
    implementation = "pallas"
    dtype = jnp.bfloat16
    dtypes = (jnp.float16,)
    # A chunk's decay factors are taken about half of its gates' sum, so that another document's
    # gates in the same chunk change how one's own are rounded, though not what they mean.
    bitwise = False
