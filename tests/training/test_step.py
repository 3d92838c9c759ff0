"""The loss, accumulation by tokens, and steps whose gradient is not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nha_jax.models.language_model import NHALanguageModel
from nha_jax.training import step as train_step
from nha_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from tests.training.tiny import packed_batch, tiny_config

BYTE_LENGTHS = jnp.asarray([1] * 256 + [0] * 4, jnp.int32)


MODEL = NHALanguageModel(tiny_config().model)


@pytest.fixture(scope="module")
def params() -> Any:
    init = jax.jit(lambda key: train_step.unbox(MODEL.init(key, jnp.zeros((1, 2), jnp.int32))))
    return init(jax.random.key(0))["params"]


@functools.cache
def accumulate(microbatches: int) -> Any:
    """The gradient and the sums of a batch, compiled."""
    return jax.jit(
        functools.partial(
            train_step.accumulate_gradients, MODEL, microbatches=microbatches, z_loss=0.1
        )
    )


def test_loss_sums_are_those_of_a_float64_program(params: Any) -> None:
    batch = packed_batch(tiny_config())

    @jax.jit
    def compute(params: Any) -> Any:
        logits = MODEL.apply(
            {"params": params},
            batch["tokens"],
            segment_ids=batch["segment_ids"],
            positions=batch["positions"],
        )
        return logits, train_step.loss_sums(MODEL, params, batch, BYTE_LENGTHS, z_loss=0.1)

    logits, (total, sums) = compute(params)
    logits = np.asarray(logits, np.float64)
    nats = squares = num_bytes = 0.0
    for row, column in zip(*np.nonzero(batch["loss_mask"]), strict=True):
        log_normalizer = np.log(np.sum(np.exp(logits[row, column])))
        target = batch["targets"][row, column]
        nats += log_normalizer - logits[row, column, target]
        squares += log_normalizer**2
        num_bytes += target < 256
    np.testing.assert_allclose(sums["nats"], nats, rtol=1e-5)
    np.testing.assert_allclose(sums["z_loss"], 0.1 * squares, rtol=1e-5)
    np.testing.assert_allclose(total, nats + 0.1 * squares, rtol=1e-5)
    assert sums["targets"] == batch["loss_mask"].sum()
    assert sums["bytes"] == num_bytes
    assert sums["tokens"] == (batch["segment_ids"] > 0).sum()


def test_what_is_not_a_target_has_no_part_in_the_loss(params: Any) -> None:
    batch = packed_batch(tiny_config())
    other = dict(batch)
    other["targets"] = np.where(batch["loss_mask"] > 0, batch["targets"], 7).astype(np.int32)
    assert np.any(other["targets"] != batch["targets"])
    found = accumulate(1)(params, batch, BYTE_LENGTHS)
    found_other = accumulate(1)(params, other, BYTE_LENGTHS)
    jax.tree.map(np.testing.assert_array_equal, found, found_other)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_any_split_into_microbatches_gives_the_same_gradient(
    params: Any, microbatches: int
) -> None:
    batch = packed_batch(tiny_config())
    parts = train_step.split_microbatches(batch, microbatches)
    counts = np.sum(parts["loss_mask"], axis=(1, 2))
    # Otherwise a mean of means would pass too.
    assert counts.max() > 1.2 * counts.min()
    whole, whole_sums = accumulate(1)(params, batch, BYTE_LENGTHS)
    split, split_sums = accumulate(microbatches)(params, batch, BYTE_LENGTHS)
    for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 1e-5
    jax.tree.map(
        lambda expected, found: np.testing.assert_allclose(found, expected, rtol=1e-5),
        whole_sums,
        split_sums,
    )


@functools.cache
def _step(microbatches: int) -> tuple[train_step.TrainStep, Any]:
    config = OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=4, decay_steps=20)
    schedule = learning_rate_schedule(config, 20)
    optimizer = make_optimizer(config, schedule)
    step = train_step.make_train_step(
        MODEL, optimizer, schedule, BYTE_LENGTHS, microbatches=microbatches
    )
    return jax.jit(step), optimizer


def _step_and_state(
    params: Any, microbatches: int = 1
) -> tuple[train_step.TrainStep, train_step.TrainState]:
    step, optimizer = _step(microbatches)
    zero = jnp.zeros((), jnp.int32)
    state = train_step.TrainState(
        step=zero,
        params=params,
        opt_state=optimizer.init(params),
        skipped=zero,
        skipped_in_a_row=zero,
    )
    return step, state


def _poison(state: train_step.TrainState, value: float) -> train_step.TrainState:
    """The same state, but for one parameter through which the loss is not finite."""
    params = dict(state.params)
    params["final_norm"] = {"scale": params["final_norm"]["scale"].at[0].set(value)}
    return state.replace(params=params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_only_the_counters(params: Any, value: float) -> None:
    step, state = _step_and_state(params)
    first, second = (packed_batch(tiny_config(), seed) for seed in (1, 2))
    state, metrics = step(state, first)
    assert metrics["skipped"] == 0
    bad_state = _poison(state, value)
    after_bad, metrics = step(bad_state, second)
    assert not np.isfinite(metrics["gradient_norm"])
    jax.tree.map(np.testing.assert_array_equal, after_bad.params, bad_state.params)
    jax.tree.map(np.testing.assert_array_equal, after_bad.opt_state, bad_state.opt_state)
    counters = (after_bad.step, after_bad.skipped, after_bad.skipped_in_a_row)
    assert [int(counter) for counter in counters] == [2, 1, 1]

    # A second bad one, then the cured state goes on as if nothing had been: the schedule has not
    # moved.
    twice, metrics = step(after_bad, second)
    assert (int(twice.skipped), int(metrics["skipped_in_a_row"])) == (2, 2)
    cured, metrics = step(twice.replace(params=state.params), second)
    expected, expected_metrics = step(state, second)
    jax.tree.map(np.testing.assert_array_equal, cured.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, cured.opt_state, expected.opt_state)
    assert metrics["learning_rate"] == expected_metrics["learning_rate"]
    assert (int(cured.step), int(cured.skipped), int(cured.skipped_in_a_row)) == (4, 2, 0)


def test_one_bad_microbatch_skips_the_whole_step(params: Any) -> None:
    step, state = _step_and_state(params, microbatches=4)
    batch = packed_batch(tiny_config())
    # Positions as floats, so that one can be made a NaN: the rotation of one token of one row.
    batch["positions"] = batch["positions"].astype(np.float32)
    _, metrics = step(state, batch)
    assert metrics["skipped"] == 0
    batch["positions"][0, 1] = np.nan
    after, metrics = step(state, batch)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, state.opt_state)


def test_metrics_of_a_step(params: Any) -> None:
    step, state = _step_and_state(params)
    batch = packed_batch(tiny_config())
    after, metrics = step(state, batch)
    _, sums = accumulate(1)(params, batch, BYTE_LENGTHS)
    np.testing.assert_allclose(metrics["loss"], sums["nats"] / batch["loss_mask"].sum(), rtol=1e-6)
    bits = float(sums["nats"]) / float(sums["bytes"]) / np.log(2)
    np.testing.assert_allclose(metrics["bits_per_byte"], bits, rtol=1e-6)
    # The first moment after one step is a tenth of the clipped gradient.
    mu = optax.tree.get(after.opt_state, "mu")
    norm = float(metrics["gradient_norm"])
    np.testing.assert_allclose(10 * optax.tree.norm(mu), min(norm, 1.0), rtol=1e-5)
    assert metrics["learning_rate"] == 0.0
    assert metrics["targets"] == batch["loss_mask"].sum()
    for name in ("slot_share", "log_gate_mean", "retention"):
        assert metrics[name].shape == (1,)
    assert 0 < metrics["slot_share"][0] < 1
