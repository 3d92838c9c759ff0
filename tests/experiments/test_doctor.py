"""The doctor: what it reports, and when it fails."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from experiments import doctor

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "experiments.doctor", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_required_gpu_that_is_absent_fails_in_one_sentence() -> None:
    run = _run("--require_gpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert run.returncode == 1
    # The report comes all the same: it is what tells why.
    assert f"  jax {importlib.metadata.version('jax')}" in run.stdout.splitlines()
    assert "  XLA_FLAGS=--xla_force_host_platform_device_count=2" in run.stdout.splitlines()
    assert "  JAX_PLATFORMS=cpu" in run.stdout.splitlines()
    sentence = run.stderr.splitlines()[-1]
    assert sentence.endswith("A GPU is required (--require_gpu), but JAX sees only: cpu.")


def test_a_platform_that_cannot_start_fails_in_one_sentence() -> None:
    run = _run(JAX_PLATFORMS="no_such_platform")
    assert run.returncode == 1
    sentence = run.stderr.splitlines()[-1]
    assert "JAX cannot start (JAX_PLATFORMS is no_such_platform)" in sentence


def test_report_names_every_device_and_implementation() -> None:
    lines = doctor.report(jax.devices())
    assert sum(line.startswith("  cpu:") for line in lines) == len(jax.devices())
    for name in ("reference", "xla", "pallas", "triton"):
        assert sum(line.startswith(f"  {name} (") for line in lines) == 1
    assert sum("(chosen)" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("versions", "requirements", "problem"),
    [
        (
            {"jaxlib": "0.11.2", "jax-cuda13-plugin": "0.11.1"},
            {},
            "jax-cuda13-plugin 0.11.1 does not go with jaxlib 0.11.2.",
        ),
        (
            {"jaxlib": "0.11.2", "jax-triton": "0.4.1", "triton": "3.6.0"},
            {"jax-triton": ["triton>=3.7"]},
            "jax-triton 0.4.1 needs triton >=3.7, but 3.6.0 is installed.",
        ),
    ],
)
def test_versions_that_do_not_go_together_are_named(
    versions: dict[str, str], requirements: dict[str, list[str]], problem: str
) -> None:
    assert doctor.version_problems(versions, requirements) == [problem]


def test_versions_that_go_together_are_no_problem() -> None:
    versions = {
        "jaxlib": "0.11.2",
        "jax-cuda13-plugin": "0.11.2.post1",
        "jax-triton": "0.4.1",
        "triton": "3.9.0",
    }
    # An extra that nobody asked for asks for nothing.
    requirements = {"jax-triton": ["triton>=3.7", 'jaxlib>=9; extra == "tests"']}
    assert doctor.version_problems(versions, requirements) == []
