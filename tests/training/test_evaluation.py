"""Evaluation weighs targets, takes what it is told to take, and can be stopped."""

from typing import Any

import jax
import numpy as np
import pytest

from nha_jax.models.language_model import NHALanguageModel
from nha_jax.ops.windows import windows_array
from nha_jax.training.evaluation import evaluate, make_evaluation_step
from nha_jax.training.sharding import MeshConfig, batch_sharding, make_mesh
from tests.inference.small import params_of
from tests.training.tiny import packed_batch, tiny_config


def _step(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    mask = batch["loss_mask"]
    return {
        "nats": params * (batch["targets"] * mask).sum(),
        "targets": mask.sum(),
        "bytes": 2 * mask.sum(),
    }


def _batches() -> list[dict[str, np.ndarray]]:
    targets = np.arange(24, dtype=np.int32).reshape(3, 8, 1)
    mask = np.ones_like(targets)
    mask[2, 3:] = 0
    return [{"targets": targets[i], "loss_mask": mask[i]} for i in range(3)]


@pytest.mark.parametrize(("max_batches", "count"), [(None, 19), (2, 16), (9, 19)])
def test_means_are_over_targets_and_bytes(max_batches: int | None, count: int) -> None:
    sharding = batch_sharding(make_mesh(MeshConfig()))
    results = evaluate(_step, 0.5, _batches(), sharding, max_batches=max_batches)
    nats = 0.5 * sum(range(count))
    assert results is not None
    np.testing.assert_allclose(results["loss"], nats / count)
    np.testing.assert_allclose(results["bits_per_byte"], nats / (2 * count) / np.log(2))
    assert results["targets"] == count


def test_nothing_to_evaluate_and_being_stopped_give_none() -> None:
    sharding = batch_sharding(make_mesh(MeshConfig()))
    assert evaluate(_step, 0.5, [], sharding) is None
    calls = iter([False, True])
    assert evaluate(_step, 0.5, _batches(), sharding, should_stop=lambda: next(calls)) is None


def test_one_program_evaluates_every_setting_of_the_windows() -> None:
    config, batch = tiny_config().model, packed_batch(tiny_config())
    byte_lengths = jax.numpy.ones(config.vocab_size, "int32")
    params = params_of(config)
    step = jax.jit(make_evaluation_step(NHALanguageModel(config), byte_lengths))
    found = {}
    for window in (0, 2, 4, None):
        found[window] = step(params, batch, windows_array((window,)))["nats"]
    assert step._cache_size() == 1
    assert len({float(nats) for nats in found.values()}) == 4
    own = step(params, batch)["nats"]  # the model's windows are static: a program of its own
    np.testing.assert_allclose(found[4], own, rtol=1e-5)
