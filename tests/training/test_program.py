"""What is refused before any data is read, and what running out of memory says."""

import jax
import pytest

from nha_jax.configuration import ConfigurationError
from nha_jax.training.program import (
    OutOfMemoryError,
    check_dtypes,
    check_program,
    out_of_memory_errors,
)
from nha_jax.training.sharding import make_mesh
from tests.training.tiny import tiny_config


def test_a_model_that_runs_here_is_fine() -> None:
    config = tiny_config()
    check_program(config, make_mesh(config.mesh, jax.devices()[:1]))


def test_an_implementation_that_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    config = tiny_config(**{"model.implementation": "pallas"})
    with pytest.raises(ConfigurationError, match=r"config\.model cannot run here: .*'pallas'"):
        check_program(config, make_mesh(config.mesh, jax.devices()[:1]))


def test_a_model_larger_than_memory() -> None:
    changes = {"model.width": 200_000, "model.feed_forward_width": 1_000_000}
    config = tiny_config(**changes, **{"model.num_layers": 100})
    with pytest.raises(ConfigurationError, match=r"parameters: with .* take [\d,.]+ GiB on each"):
        check_program(config, make_mesh(config.mesh, jax.devices()[:1]))


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_float64_is_not_narrowed_in_silence(name: str) -> None:
    config = tiny_config(**{f"model.{name}": "float64"})
    with pytest.raises(ConfigurationError, match=f"config.model.{name} is 'float64'"):
        check_dtypes(config.model)
    with jax.enable_x64(True):
        check_dtypes(config.model)


def test_running_out_of_memory_says_what_to_lower() -> None:
    config = tiny_config()
    with (
        pytest.raises(OutOfMemoryError, match=r"RESOURCE_EXHAUSTED.*batch_size \(now 8\)"),
        out_of_memory_errors(config),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nx")
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory_errors(config):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
