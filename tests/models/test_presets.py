"""The shipped model shapes: within 5% of the size in their name, counted without allocating."""

import dataclasses
import importlib

import pytest

from nha_jax.configuration import from_mapping
from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import count_parameters
from nha_jax.models.layers import plan_layers
from nha_jax.training.config import RunConfig


def _load(name):
    config = importlib.import_module(f"configs.{name}").get_config()
    return from_mapping(RunConfig, config.to_dict())


@pytest.mark.parametrize(
    ("name", "nominal", "tokens"),
    [("nha_340m", 340e6, 15e9), ("nha_1_3b", 1.3e9, 100e9)],
)
def test_size_and_tokens_are_nominal(name, nominal, tokens):
    run = _load(name)
    assert abs(count_parameters(run.model) / nominal - 1) < 0.05
    per_step = run.data.sequence_length * run.data.batch_size
    assert 0 <= tokens - run.train.steps * per_step < per_step
    assert run.data.batch_size % run.train.microbatches == 0
    assert run.optimizer.peak_learning_rate == 3e-4
    assert run.optimizer.warmup_steps == 1024


@pytest.mark.parametrize("name", ["nha_340m", "nha_1_3b"])
def test_every_eighth_layer_is_full_and_only_two_bodies_are_compiled(name):
    model = _load(name).model
    assert model.layer_windows == ((32,) * 7 + (None,)) * 3
    (group,) = plan_layers(model.layer_windows)
    assert [(run.window, run.length) for run in group.runs] == [(32, 7), (None, 1)]
    assert group.repeats == 3


def test_the_count_is_that_of_the_formula():
    model = _load("nha_340m").model
    d, n, k, h, m, f = 1024, 16, 8, 64, 64, 2816
    layer = d * h * (2 * n + 2 * k) + d * k * m + 3 * d * f + 2 * d
    assert count_parameters(model) == 24 * layer + 32000 * d + d
    untied = dataclasses.replace(model, tie_embeddings=False)
    assert isinstance(untied, NHAConfig)
    assert count_parameters(untied) == 24 * layer + 2 * 32000 * d + d
