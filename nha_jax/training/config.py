"""The whole configuration of a training run, and which of its fields a restart may change."""

import dataclasses
from typing import Any

from nha_jax.configuration import ConfigurationError, changed_fields
from nha_jax.data.config import DataConfig
from nha_jax.models.config import NHAConfig
from nha_jax.ops.windows import Window, parse_window_choices
from nha_jax.training.checkpoint import CheckpointConfig
from nha_jax.training.optimizer import OptimizerConfig, learning_rate_schedule
from nha_jax.training.sharding import MeshConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Attributes:
        steps: optimizer steps of the whole run; a restart with a larger number goes on.
        seed: seed of the parameters and of the sample. The order of the data has `data.seed`.
        microbatches: parts in which a batch is computed one after the other to save memory; the
            result is the same for any number.
        z_loss: weight of the squared log-sum-exp of the logits, 1e-4 where it is wanted.
        max_skipped_in_a_row: steps in a row with a gradient that is not finite after which the run
            stops.
        log_every_steps: steps between two progress lines and two lines of metrics.jsonl.
        tensorboard: whether metrics also go to TensorBoard files in `workdir/tensorboard`.
        peak_flops: peak floating point operations a second of one device, for the share of it that
            the model uses ("mfu"); None takes it from a table of known devices and leaves it out
            for others.
        random_windows: windows to draw from, such as "16,64,full", anew for every step and every
            layer by itself, which makes a model fit for other windows than `model.windows`; None
            trains with `model.windows`. Evaluations always use `model.windows`.
    """

    steps: int
    seed: int = 0
    microbatches: int = 1
    z_loss: float = 0.0
    max_skipped_in_a_row: int = 10
    log_every_steps: int = 10
    tensorboard: bool = True
    peak_flops: float | None = None
    random_windows: str | int | tuple[int | str | None, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "microbatches", "max_skipped_in_a_row", "log_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, found {self.seed}.")
        if self.z_loss < 0:
            raise ValueError(f"z_loss must be 0 or more, found {self.z_loss}.")
        if self.peak_flops is not None and self.peak_flops <= 0:
            raise ValueError(f"peak_flops must be None or greater than 0, found {self.peak_flops}.")
        try:
            choices = parse_window_choices(self.random_windows)
        except ValueError as error:
            raise ValueError(f"random_windows: {error}") from error
        # In one form, however it was given, so that a restart finds it unchanged.
        written = ",".join("full" if window is None else str(window) for window in choices)
        object.__setattr__(self, "random_windows", written or None)

    @property
    def window_choices(self) -> tuple[Window, ...]:
        """The windows to draw from; empty where none are drawn."""
        return parse_window_choices(self.random_windows)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """What is measured on the validation split, and the sample at the end of a run.

    Attributes:
        every_steps: steps between evaluations; 0 evaluates only after the last step.
        max_batches: batches of an evaluation, always the first ones; None takes the whole split.
        sample_tokens: tokens to generate after the last step; 0 for no sample.
        sample_prompt: text that the sample continues.
        sample_temperature: 0 takes the likeliest token; 1 samples from the model's distribution.
    """

    every_steps: int = 0
    max_batches: int | None = None
    sample_tokens: int = 0
    sample_prompt: str = ""
    sample_temperature: float = 0.8

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(f"every_steps must be 0 or more, found {self.every_steps}.")
        if self.max_batches is not None and self.max_batches < 1:
            raise ValueError(f"max_batches must be None or 1 or more, found {self.max_batches}.")
        if self.sample_tokens < 0:
            raise ValueError(f"sample_tokens must be 0 or more, found {self.sample_tokens}.")
        if self.sample_temperature < 0:
            raise ValueError(
                f"sample_temperature must be 0 or more, found {self.sample_temperature}."
            )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run: one section for each part of the program."""

    model: NHAConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        if self.model.param_dtype not in ("float32", "float64"):
            raise ValueError(
                "model.param_dtype must be 'float32' for training, because small updates vanish in "
                f"{self.model.param_dtype!r} (model.dtype is the dtype of the computation)."
            )
        # Refuses a warmup that does not fit.
        learning_rate_schedule(self.optimizer, self.train.steps)


# What a restart may change. Everything else decides what the parameters mean or which batches come,
# and changing it would give a run that is neither the old one nor a new one.
_CHANGEABLE = (
    "config.model.implementation",
    "config.model.remat",
    "config.data.num_workers",
    "config.data.prefetch",
    "config.data.max_bad_records",
    "config.data.cache_dir",
    "config.optimizer.",
    "config.train.steps",
    "config.train.microbatches",
    "config.train.z_loss",
    "config.train.max_skipped_in_a_row",
    "config.train.log_every_steps",
    "config.train.tensorboard",
    "config.train.peak_flops",
    "config.train.random_windows",
    "config.evaluation.",
    "config.checkpoint.",
    "config.mesh.",
)
# Of these the next steps depend, so a change is allowed but never silent.
_CHANGES_RESULT = ("config.optimizer.", "config.train.z_loss", "config.train.random_windows")


def check_resumable(
    saved: dict[str, Any], current: dict[str, Any], directory: str, *, ignore: tuple[str, ...] = ()
) -> list[str]:
    """Compares the configuration of a checkpoint with the one that is to continue it.

    Args:
        saved: the run configuration in the checkpoint, plain.
        current: the run configuration now, plain.
        directory: where the checkpoint is, for the message.
        ignore: sections that are not compared.

    Returns:
        One sentence for each change that is allowed and alters the steps to come.

    Raises:
        ConfigurationError: naming every changed field that a restart may not change.
    """
    changes = {
        path: values
        for path, values in changed_fields(saved, current).items()
        if path.split(".")[1] not in ignore
    }
    fixed = [path for path in changes if not path.startswith(_CHANGEABLE)]
    if fixed:
        found = "; ".join(
            f"{path} is {changes[path][1]!r}, was {changes[path][0]!r}" for path in fixed
        )
        raise ConfigurationError(
            f"The run in {directory} cannot go on with another model or other data: {found}. "
            "Restore these fields or use another workdir."
        )
    notes = [
        f"{path} is now {new!r}, was {old!r}."
        for path, (old, new) in changes.items()
        if path.startswith(_CHANGES_RESULT)
    ]
    old_steps, new_steps = saved["train"]["steps"], current["train"]["steps"]
    if old_steps != new_steps and current["optimizer"]["decay_steps"] is None:
        notes.append(
            f"The learning rate schedule now has {new_steps} steps, was {old_steps}, because "
            "config.optimizer.decay_steps is None."
        )
    return notes
