"""Strictness as a habit, for every test: where JAX runs, and what it does not let pass.

Tests run on eight CPU devices that share the machine's cores, so that sharding is tested
everywhere. `pytest -m gpu` runs the tests that need a GPU, on JAX's default platform; without it
they are left out.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


def _wants_gpu(config: pytest.Config) -> bool:
    """Whether the mark expression of the command line asks for the GPU tests."""
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


def _share_compilations(folder: Path) -> None:
    """Keeps what XLA compiled, for this process and, in a folder apart, for those that tests start.

    Compiling takes most of the time of many tests, and a test of resuming runs one program many
    times over. The folders are apart because tests kill processes, in the middle of a write too.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder / "here"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "started")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"


def pytest_configure(config: pytest.Config) -> None:
    if not _wants_gpu(config):
        # For this process and for those that tests start. The eight devices are for this process
        # alone: what is started runs as it would for a user.
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Triton reads it where a kernel is defined: here kernels run in its interpreter.
        os.environ["TRITON_INTERPRET"] = "1"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        _share_compilations(config.rootpath / ".pytest_cache" / "jax")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _wants_gpu(config):
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def unchanged_jax_configuration() -> Iterator[None]:
    """Fails a test that leaves a JAX setting behind, such as 64 bits switched on globally."""
    before = dict(jax.config.values)
    yield
    changed = sorted(name for name, value in jax.config.values.items() if before[name] != value)
    for name in changed:
        jax.config.update(name, before[name])
    assert not changed, f"the test left JAX settings changed: {', '.join(changed)}"


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types inside the one test that asks for this fixture."""
    with jax.enable_x64(True):
        yield
