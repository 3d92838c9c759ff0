"""The Triton kernels pass the operator's suite, in Triton's interpreter."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from nha_jax.ops import kernels
from tests.ops.operator_suite import OperatorSuite
from tests.ops.triton_interpreter import interpreted

ROOT = Path(__file__).parents[2]


def pytest_generate_tests(metafunc):
    if "gradient_case" in metafunc.fixturenames:
        metafunc.parametrize("gradient_case", metafunc.cls.gradient_cases)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The same kernels and launches; only what runs a kernel, and what asks for a GPU, differs."""
    monkeypatch.setattr("pallas.triton.launch.launcher", interpreted)
    monkeypatch.setattr(kernels, "device_problem", lambda name: None)


class TestTriton(OperatorSuite):
    implementation = "triton"
    dtypes = (jnp.bfloat16, jnp.float16)  # float64 is not for tensor cores; see the test below
