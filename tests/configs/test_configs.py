"""Every shipped config loads, and those that a test can afford take a step."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.command_line import load_config
from nha_jax.configuration import from_mapping
from nha_jax.models.language_model import count_parameters
from nha_jax.training.config import RunConfig
from nha_jax.training.program import build_program
from nha_jax.training.sharding import check_divisible, make_mesh, put_batch
from tests.training.tiny import packed_batch

CONFIGS = sorted(
    path for path in (Path(__file__).parents[2] / "configs").glob("*.py") if path.stem != "__init__"
)
LARGEST_TO_STEP = 10_000_000


def _load(path: Path) -> RunConfig:
    return from_mapping(RunConfig, load_config(RunConfig, path).to_dict())


def _is_small(path: Path) -> bool:
    return count_parameters(_load(path).model) < LARGEST_TO_STEP


def test_the_demo_is_small() -> None:
    assert [path.stem for path in CONFIGS if _is_small(path)] == ["demo_text"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_fits_four_devices(path: Path) -> None:
    config = _load(path)
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    check_divisible(
        mesh,
        config.model,
        config.data.batch_size,
        config.train.microbatches,
        config.data.sequence_length,
    )
    program = build_program(config, mesh, np.ones(256, np.int32))
    assert program.abstract_state.params["embed"].shape == (
        config.model.vocab_size,
        config.model.width,
    )


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.stem == "demo_text"], ids=lambda path: path.stem
)
def test_a_small_config_takes_a_step(path: Path) -> None:
    config = _load(path)
    # Short rows of few: the step's program is the same but for its shapes.
    data = dataclasses.replace(config.data, batch_size=4, sequence_length=48)
    config = dataclasses.replace(config, data=data)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        program = build_program(config, mesh, np.ones(256, np.int32))
        batch = put_batch(packed_batch(config), program.batch_sharding)
        _, metrics = program.train_step(program.init(), batch)
    assert np.isfinite(metrics["loss"])
    assert metrics["skipped"] == 0
    # A uniform guess at first.
    np.testing.assert_allclose(metrics["loss"], np.log(config.model.vocab_size), rtol=0.05)
