"""Loss and bits per byte on the validation split."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from nha_jax.training.sharding import put_batch
from nha_jax.training.step import loss_sums

EvaluationStep = Callable[..., dict[str, jax.Array]]


def make_evaluation_step(model: nn.Module, byte_lengths: Int[Array, " V"]) -> EvaluationStep:
    """Returns a pure function (params, batch) -> sums over the batch's targets, to be jitted.

    It takes windows of the layers as a third argument, an int32 array [L], so that one compiled
    program serves all settings; without it the model's own are used.

    Args:
        model: a language model.
        byte_lengths: bytes that each token id stands for.
    """

    def evaluation_step(
        params: Any, batch: dict[str, jax.Array], windows: Int[Array, " L"] | None = None
    ) -> dict[str, jax.Array]:
        _, sums = loss_sums(model, params, batch, byte_lengths, windows=windows)
        return {name: sums[name] for name in ("nats", "targets", "bytes")}

    return evaluation_step


def evaluate(
    step: EvaluationStep,
    params: Any,
    batches: Iterable[dict[str, Any]],
    sharding: NamedSharding,
    *,
    max_batches: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Returns the mean loss and the bits per byte over batches.

    Args:
        step: as from `make_evaluation_step`, jitted.
        params: the parameters.
        batches: this process's batches.
        sharding: of the batches.
        max_batches: how many batches to take at most.
        should_stop: asked before every batch; True ends the evaluation.

    Returns:
        "loss" (nats a target), "bits_per_byte", "targets" and "bytes"; None if it was stopped or
        there was nothing to evaluate on.
    """
    sums = []
    for batch in itertools.islice(batches, max_batches):
        if should_stop():
            return None
        # Fetched below, all at once: the device does not wait for the host between batches.
        sums.append(step(params, put_batch(batch, sharding)))
    total = {
        name: float(sum(np.float64(batch_sums[name]) for batch_sums in jax.device_get(sums)))
        for name in ("nats", "targets", "bytes")
    }
    if not total["targets"]:
        return None
    return {
        "loss": total["nats"] / total["targets"],
        "bits_per_byte": total["nats"] / max(total["bytes"], 1.0) / math.log(2.0),
        "targets": total["targets"],
        "bytes": total["bytes"],
    }
