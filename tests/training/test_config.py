"""What a run refuses before it begins, and what a restart may change."""

import re
from typing import Any

import pytest

from nha_jax.configuration import ConfigurationError, to_mapping
from nha_jax.training.config import check_resumable
from tests.training.tiny import tiny_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.steps": 0}, "config.train: steps must be 1 or more, found 0."),
        ({"train.microbatches": 0}, "config.train: microbatches must be 1 or more"),
        ({"train.seed": -1}, "config.train: seed must be from 0"),
        ({"train.z_loss": -1.0}, "config.train: z_loss must be 0 or more"),
        ({"train.peak_flops": 0.0}, "config.train: peak_flops must be None or greater than 0"),
        ({"evaluation.every_steps": -1}, "config.evaluation: every_steps must be 0 or more"),
        ({"evaluation.max_batches": 0}, "config.evaluation: max_batches must be None or 1 or more"),
        ({"evaluation.sample_tokens": -1}, "config.evaluation: sample_tokens must be 0 or more"),
        ({"evaluation.sample_temperature": -0.1}, "sample_temperature must be 0 or more"),
        ({"model.param_dtype": "bfloat16"}, "model.param_dtype must be 'float32' for training"),
        (
            {"optimizer.decay_steps": None, "optimizer.warmup_steps": 4},
            "optimizer.warmup_steps must be less than the schedule's 4 steps",
        ),
        ({"model.num_heads": 3}, "config.model: num_heads is 3"),
        ({"data.batch_size": 0}, "batch_size"),
        ({"mesh.data": 0}, "config.mesh: data must be 1 or more"),
        ({"checkpoint.keep_last": 0}, "config.checkpoint: keep_last"),
    ],
)
def test_bad_values_name_their_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        tiny_config(**changes)


def _compare(**changes: Any) -> list[str]:
    return check_resumable(to_mapping(tiny_config()), to_mapping(tiny_config(**changes)), "DIR")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.steps": 9},
        {"train.log_every_steps": 3, "train.tensorboard": True},
        {"train.microbatches": 2},
        {"data.num_workers": 2},
        {"evaluation.every_steps": 2, "checkpoint.keep_last": 7},
        {"mesh.data": 8},
        {"model.remat": "full", "model.implementation": "reference"},
    ],
)
def test_a_restart_may_change_what_alters_no_step(changes: dict[str, Any]) -> None:
    assert _compare(**changes) == []


def test_a_restart_says_what_alters_the_steps_to_come() -> None:
    assert _compare(**{"optimizer.peak_learning_rate": 0.5}) == [
        "config.optimizer.peak_learning_rate is now 0.5, was 0.01."
    ]
    before = to_mapping(tiny_config(**{"optimizer.decay_steps": None}))
    after = to_mapping(tiny_config(**{"optimizer.decay_steps": None, "train.steps": 8}))
    (note,) = check_resumable(before, after, "DIR")
    assert note.startswith("The learning rate schedule now has 8 steps, was 4")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.windows": "8"}, "config.model.windows"),
        ({"model.num_slots": 8}, "config.model.num_slots is 8, was 4"),
        ({"model.dtype": "bfloat16"}, "config.model.dtype is 'bfloat16', was 'float32'"),
        ({"data.batch_size": 16}, "config.data.batch_size is 16, was 8"),
        ({"data.seed": 1}, "config.data.seed is 1, was 0"),
        ({"data.source": "elsewhere"}, "config.data.source is 'elsewhere', was 'stdlib'"),
        ({"train.seed": 1}, "config.train.seed is 1, was 0"),
    ],
)
def test_a_restart_may_not_change_the_model_or_the_data(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)) as caught:
        _compare(**changes)
    assert "DIR" in str(caught.value)


def test_sections_can_be_left_out_of_the_comparison() -> None:
    old, new = to_mapping(tiny_config()), to_mapping(tiny_config(**{"model.num_slots": 8}))
    assert check_resumable(old, new, "DIR", ignore=("model",)) == []
