"""The loss and one optimizer step: accumulation by tokens, no update from a bad gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.core import meta
from jaxtyping import Array, Float, Int

from nha_jax.ops.windows import Window, windows_array

Batch = dict[str, jax.Array]
# Arrays, and for the statistics of the model a dictionary of arrays.
Metrics = dict[str, Any]
TrainStep = Callable[["TrainState", Batch], tuple["TrainState", Metrics]]
WindowDraw = Callable[[jax.Array], jax.Array]


@struct.dataclass
class TrainState:
    """Everything that a step changes.

    Attributes:
        step: int32 scalar, batches consumed; skipped ones count.
        params: the model's parameters in `model.param_dtype`, the master copy.
        opt_state: the optimizer's moments and counts.
        skipped: int32 scalar, steps whose update was skipped. `step - skipped` updates were
            applied.
        skipped_in_a_row: int32 scalar, how many of the last steps in a row were skipped.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


def init_train_state(
    model: nn.Module, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """Returns the state before the first step, its parameters boxed with their logical axis names.

    Args:
        model: a language model.
        optimizer: as from `make_optimizer`.
        key: random key of the initialisation.
    """
    params = model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params=params,
        opt_state=optimizer.init(params),
        skipped=zero,
        skipped_in_a_row=zero,
    )


def unbox(tree: Any) -> Any:
    """Returns a tree without Linen's partitioning boxes."""
    return meta.unbox(tree)


def cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns the nats of each target, and the log-sum-exp of the logits, in float32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_normalizer - target_logits, log_normalizer


def loss_sums(
    model: nn.Module,
    params: Any,
    batch: Batch,
    byte_lengths: Int[Array, " V"],
    *,
    z_loss: float = 0.0,
    windows: Int[Array, " L"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss of a batch as a sum over its tokens.

    Sums, not means: sums of microbatches add up to the sum of their batch whatever their token
    counts.

    Args:
        model: a language model.
        params: its parameters.
        batch: int32 arrays [B, T] "tokens", "targets", "segment_ids", "positions" and "loss_mask".
        byte_lengths: bytes that each token id stands for.
        z_loss: weight of the squared log-sum-exp of the logits.
        windows: windows of the layers as data, as from `nha_jax.ops.windows.windows_array`; None
            for the model's.

    Returns:
        The sum to be differentiated, and sums "nats", "z_loss", "targets", "bytes" and "tokens"
        (real tokens), and statistics of the model multiplied by "tokens".
    """
    logits, statistics = model.apply(
        {"params": params},
        batch["tokens"],
        segment_ids=batch["segment_ids"],
        positions=batch["positions"],
        windows=windows,
        return_statistics=True,
    )
    nats, log_normalizer = cross_entropy(logits, batch["targets"])
    counted = batch["loss_mask"] > 0
    # where, not a product: an infinite loss on padding must not become NaN.
    nats = jnp.sum(jnp.where(counted, nats, 0.0))
    z_sum = z_loss * jnp.sum(jnp.where(counted, jnp.square(log_normalizer), 0.0))
    tokens = jnp.sum(batch["segment_ids"] > 0).astype(jnp.float32)
    sums = {
        "nats": nats,
        "z_loss": z_sum,
        "targets": jnp.sum(counted).astype(jnp.float32),
        "bytes": jnp.sum(jnp.where(counted, byte_lengths[batch["targets"]], 0)).astype(jnp.float32),
        "tokens": tokens,
        "statistics": jax.tree.map(lambda mean: jax.lax.stop_gradient(mean) * tokens, statistics),
    }
    return nats + z_sum, sums


def split_microbatches(batch: Batch, microbatches: int) -> Batch:
    """Returns each array [B, ...] as [microbatches, B / microbatches, ...].

    Microbatch i takes rows i, i + microbatches, ...: where rows are split over devices in blocks,
    each device then has its share of every microbatch, and nothing has to move.
    """
    return {
        name: jnp.moveaxis(rows.reshape(-1, microbatches, *rows.shape[1:]), 1, 0)
        for name, rows in batch.items()
    }


def accumulate_gradients(
    model: nn.Module,
    params: Any,
    batch: Batch,
    byte_lengths: Int[Array, " V"],
    *,
    microbatches: int = 1,
    z_loss: float = 0.0,
    windows: Int[Array, " L"] | None = None,
) -> tuple[Any, Metrics]:
    """Returns the gradient of a batch's mean loss over its targets, and the sums of `loss_sums`.

    Args:
        model: a language model.
        params: its parameters.
        batch: as for `loss_sums`; B must be a multiple of `microbatches`.
        byte_lengths: bytes that each token id stands for.
        microbatches: how many parts the batch is computed in, one after the other. Their number
            changes the memory needed and not the result (but for rounding), because what is added
            up are sums over tokens, divided once by the number of targets of the whole batch.
        z_loss: weight of the squared log-sum-exp of the logits.
        windows: windows of the layers as data; None for the model's.
    """

    def gradient(part: Batch) -> tuple[Any, Metrics]:
        def loss(params: Any) -> tuple[jax.Array, Metrics]:
            return loss_sums(model, params, part, byte_lengths, z_loss=z_loss, windows=windows)

        return jax.grad(loss, has_aux=True)(params)

    if microbatches == 1:
        gradients, sums = gradient(batch)
    else:
        parts = split_microbatches(batch, microbatches)
        shapes = jax.eval_shape(gradient, jax.tree.map(lambda rows: rows[0], parts))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(part)), None

        (gradients, sums), _ = jax.lax.scan(add, zeros, parts)
    targets = jnp.maximum(sums["targets"], 1.0)
    return jax.tree.map(lambda leaf: leaf / targets.astype(leaf.dtype), gradients), sums


def make_window_draw(choices: Sequence[Window], num_layers: int, seed: int) -> WindowDraw:
    """Returns a function that draws a window for each layer, from the number of a step.

    The same step of the same seed draws the same windows, in a resumed run too, and every layer
    draws by itself. The windows are data: all steps are one compiled program.

    Args:
        choices: the windows to draw from, each as likely as the others.
        num_layers: number of layers (L).
        seed: seed of the run.
    """
    valid = windows_array(choices)

    def draw(step: Int[Array, ""]) -> Int[Array, " L"]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return valid[jax.random.randint(key, (num_layers,), 0, len(choices))]

    return draw


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    byte_lengths: Int[Array, " V"],
    *,
    microbatches: int = 1,
    z_loss: float = 0.0,
    draw_windows: WindowDraw | None = None,
) -> TrainStep:
    """Returns a pure function (state, batch) -> (state, metrics), to be jitted and donated to.

    With `draw_windows`, as from `make_window_draw`, the step takes windows of its own.

    Where the loss or the global norm of the gradient is not finite (a norm beyond float32
    included), the step changes nothing but `step`, `skipped` and `skipped_in_a_row`: parameters,
    moments and the schedule stay.

    The metrics are scalars and arrays [L], all float32 or int32: "loss" (mean nats of a target),
    "z_loss", "bits_per_byte", "gradient_norm" (before the clip), "learning_rate", "targets",
    "tokens", "skipped", "skipped_in_a_row", one entry for each statistic of the model, and
    "windows" where they are drawn.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        windows = None if draw_windows is None else draw_windows(state.step)
        gradients, sums = accumulate_gradients(
            model,
            state.params,
            batch,
            byte_lengths,
            microbatches=microbatches,
            z_loss=z_loss,
            windows=windows,
        )
        targets = jnp.maximum(sums["targets"], 1.0)
        loss = sums["nats"] / targets
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss + sums["z_loss"])

        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep_or(updated: Any, old: Any) -> Any:
            return jax.tree.map(lambda new, kept: jnp.where(finite, new, kept), updated, old)

        skipped = state.skipped + jnp.where(finite, 0, 1)
        skipped_in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        metrics = {
            "loss": loss,
            "z_loss": sums["z_loss"] / targets,
            "bits_per_byte": bits_per_byte(sums["nats"], sums["bytes"]),
            "gradient_norm": norm,
            "learning_rate": jnp.asarray(schedule(state.step - state.skipped), jnp.float32),
            "targets": sums["targets"],
            "tokens": sums["tokens"],
            "skipped": skipped,
            "skipped_in_a_row": skipped_in_a_row,
        }
        if windows is not None:
            metrics["windows"] = windows
        tokens = jnp.maximum(sums["tokens"], 1.0)
        metrics |= {name: total / tokens for name, total in sums["statistics"].items()}
        new_state = TrainState(
            step=state.step + 1,
            params=keep_or(params, state.params),
            opt_state=keep_or(opt_state, state.opt_state),
            skipped=skipped,
            skipped_in_a_row=skipped_in_a_row,
        )
        return new_state, metrics

    return train_step


def bits_per_byte(nats: Any, num_bytes: Any) -> Any:
    """Returns nats per byte in bits; 0 bytes count as one."""
    return nats / jnp.maximum(num_bytes, 1) / jnp.log(2.0)
