"""The Triton kernels pass the operator's suite, in Triton's interpreter."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax import native_hybrid_attention
from nha_jax.ops import kernels
from pallas.triton import attention
from pallas.triton.configs import KernelConfig
from tests.ops import oracle
from tests.ops.cases import HARD_GATES, Case
from tests.ops.operator_suite import (
    OperatorSuite,
    assert_close,
    choose_cases,
    exact_gradients,
    scalar_loss,
)
from tests.ops.triton_interpreter import interpreted

ROOT = Path(__file__).parents[2]


def pytest_generate_tests(metafunc):
    choose_cases(metafunc)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The same kernels and launches; only what runs a kernel, and what asks for a GPU, differs."""
    monkeypatch.setattr("pallas.triton.launch.launcher", interpreted)
    monkeypatch.setattr(kernels, "device_problem", lambda name: None)


class TestTriton(OperatorSuite):
    implementation = "triton"
    dtypes = (jnp.bfloat16, jnp.float16)  # tensor cores have no use for float64: refused below


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"H": 260}, "key heads are at most 256 wide, but these are 260"),
        ({"V": 257}, "value heads are at most 256 wide, but these are 257"),
        ({"M": 129}, "at most 128 slots fit a tile, but there are 129"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(changes, reason):
    arrays = dataclasses.replace(Case(window=3, T=2), **changes).arrays()
    with pytest.raises(NotImplementedError, match=f"'triton' cannot run: {reason}"):
        native_hybrid_attention(**arrays, window=3, implementation="triton")


def test_float64_is_refused(x64):
    arrays = Case(window=3, T=2).arrays(jnp.float64)
    with pytest.raises(NotImplementedError, match="float32, not float64"):
        native_hybrid_attention(**arrays, window=3, implementation="triton")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 48}, "chunk must be a power of two from 16 to 128, but was 48"),
        ({"warps": 2}, "warps must be 4 or 8, but was 2"),
        ({"stages": 9}, "stages must be from 1 to 4, but was 9"),
        ({"limit": 200.0}, "limit must be above 0 and at most 120, but was 200.0"),
    ],
)
def test_wrong_tiles_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KernelConfig(**options)


def test_gentle_and_hard_chunks_in_one_call():
    """One head's middle chunk is hard, the others' chunks are not: both ways meet in one state."""
    case = Case(window=6, T=80, B=1, N=2, K=2, M=4)
    arrays = case.arrays()
    gates = np.array(arrays["log_gate"])
    hard = np.random.default_rng(2).choice(HARD_GATES, size=(32, case.M))
    gates[0, 32:64, 1] = hard
    arrays["log_gate"] = jnp.asarray(gates)
    expected = oracle.evaluate(**arrays, **case.options(), window=6)
    out = native_hybrid_attention(**arrays, **case.options(), window=6, implementation="triton")
    assert_close(out, expected.out, 1e-5)


@pytest.mark.parametrize("window", [2, 16])
def test_tiles_of_bfloat16_heads_in_fp32(window):
    """Tiles that hold a whole head and a short window at once, as 16-bit inputs get them."""
    case = Case(window=window, T=37, H=24, V=20, M=9, N=4, K=2, B=1)
    arrays = case.arrays()
    config = KernelConfig(chunk=16, heads=2, limit=30.0)
    number = jnp.arange(case.T, dtype=jnp.int32)[None]

    def run(query, key, value, log_gate):
        out, _, _ = attention(
            query,
            key,
            value,
            log_gate,
            query,
            key,
            number,
            None,
            window=window,
            scale=case.H**-0.5,
            sink=False,
            with_slots=False,
            use_slots=True,
            config=config,
        )
        return out

    expected = oracle.evaluate(**arrays, window=window)
    out, pull = jax.vjp(run, *arrays.values())
    assert_close(out, expected.out, 1e-5)
    unrotated = dataclasses.replace(case, rotary=False)
    judge = exact_gradients(unrotated)
    direction = jax.grad(lambda out: _loss(out))(out)
    for found, name in zip(pull(direction), arrays, strict=True):
        assert_close(found, judge[name], 1e-4)


def _loss(out):
    from tests.ops.operator_suite import cotangent

    return jnp.sum(out * cotangent(out.shape))


@pytest.mark.parametrize("window", [0, 1])
def test_gradients_in_bfloat16_where_all_mass_is_on_slots(window):
    """Slots are alike, so that what softmax gradients subtract must come from the same products."""
    case = Case(window=window, T=67, B=1, N=2, K=1, H=32, V=32, M=16)
    found = jax.grad(scalar_loss)(
        case.arrays(jnp.bfloat16), case.options(), window, implementation="triton"
    )
    for name, expected in exact_gradients(case, jnp.bfloat16).items():
        assert_close(found[name], expected, 1e-2)


def test_kernels_compile_for_gpus():
    """What the compiler refuses, or what does not fit an SM, does not show in the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_compiler"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "readers" in run.stdout
