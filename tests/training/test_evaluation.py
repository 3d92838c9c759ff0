"""Evaluation weighs targets, takes what it is told to take, and can be stopped."""

from typing import Any

import jax
import numpy as np
import pytest

from nha_jax.training.evaluation import evaluate
from nha_jax.training.sharding import MeshConfig, batch_sharding, make_mesh


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
