"""AdamW that decays matrices only, linear warmup and cosine decay, and a global-norm clip."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import meta

# Parameters that are vectors by meaning, whatever their rank: the scale of a norm is [L, width]
# once layers are stacked, and a bias of the query projection [L, heads, head width].
_VECTOR_NAMES = ("scale", "bias")
# Taps of a depthwise convolution mix no channels: each channel has a vector of its own.
_VECTOR_MODULES = ("convolution",)
# The one table whose rows are looked up by token.
_EMBEDDING_NAMES = ("embed", "embedding")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate schedule.

    The learning rate rises linearly from 0 to `peak_learning_rate` over `warmup_steps` updates,
    falls as a half cosine to `final_learning_rate_ratio` times the peak at update `decay_steps`,
    and stays there.

    Attributes:
        peak_learning_rate: the largest learning rate.
        warmup_steps: updates of linear warmup, counted within `decay_steps`.
        decay_steps: length of the whole schedule in updates; None means `train.steps`. Give it a
            number to let `train.steps` change between restarts without changing the schedule.
        final_learning_rate_ratio: final learning rate divided by the peak.
        b1: decay of the first moment.
        b2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: decoupled decay of matrices, times the learning rate. Norm scales and biases
            are never decayed.
        decay_embedding: whether the token embedding counts as a matrix here. By default it does
            not: the rows of rare tokens would shrink at every step and grow only when the token
                occurs.
        clip_norm: gradients with a larger global norm are scaled down to it; None does not clip.
        mu_dtype: dtype of the first moment. The second moment and the parameters keep the
            parameters' dtype (`model.param_dtype`).
    """

    peak_learning_rate: float
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_learning_rate_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    decay_embedding: bool = False
    clip_norm: float | None = 1.0
    mu_dtype: str = "float32"

    def __post_init__(self) -> None:
        checks = {
            "peak_learning_rate": (self.peak_learning_rate > 0, "greater than 0"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "decay_steps": (self.decay_steps is None or self.decay_steps >= 1, "None or 1 or more"),
            "final_learning_rate_ratio": (0 <= self.final_learning_rate_ratio <= 1, "from 0 to 1"),
            "b1": (0 <= self.b1 < 1, "at least 0 and less than 1"),
            "b2": (0 <= self.b2 < 1, "at least 0 and less than 1"),
            "epsilon": (self.epsilon > 0, "greater than 0"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "clip_norm": (self.clip_norm is None or self.clip_norm > 0, "None or greater than 0"),
            "mu_dtype": (self.mu_dtype in ("float32", "bfloat16"), "'float32' or 'bfloat16'"),
        }
        for name, (valid, meaning) in checks.items():
            if not valid:
                raise ValueError(f"{name} must be {meaning}, found {getattr(self, name)!r}.")
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"warmup_steps must be less than decay_steps, found {self.warmup_steps} "
                f"and {self.decay_steps}."
            )


def learning_rate_schedule(config: OptimizerConfig, train_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates applied before.

    Args:
        config: the optimizer.
        train_steps: length of the schedule where `config.decay_steps` is None.

    Raises:
        ValueError: if the warmup does not fit into the schedule.
    """
    decay_steps = train_steps if config.decay_steps is None else config.decay_steps
    if config.warmup_steps >= decay_steps:
        raise ValueError(
            f"optimizer.warmup_steps must be less than the schedule's {decay_steps} steps "
            "(optimizer.decay_steps, or train.steps where that is None), found "
            f"{config.warmup_steps}."
        )
    final = config.peak_learning_rate * config.final_learning_rate_ratio
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.peak_learning_rate,
        peak_value=config.peak_learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=decay_steps,
        end_value=final,
    )


def decay_mask(params: Any, *, decay_embedding: bool = False) -> Any:
    """Returns a pytree of bools: which parameters are matrices and therefore decayed.

    The decision is by name, because stacking layers gives every parameter a rank one higher.
    Whatever is named `scale` or `bias` is a vector, and so are the taps of a depthwise convolution;
    the token embedding follows `decay_embedding`; the rest are matrices.

    Args:
        params: parameters, boxed with their logical axis names or not.
        decay_embedding: whether the token embedding is decayed.

    Returns:
        A pytree of bools with the structure of `params` (a box counts as a leaf).
    """

    def is_decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        del leaf
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        if names[-1].split("_")[-1] in _VECTOR_NAMES:
            return False
        if any(name.split("_")[-1] in _VECTOR_MODULES for name in names):
            return False
        if any(name in _EMBEDDING_NAMES for name in names):
            return decay_embedding
        return True

    return jax.tree_util.tree_map_with_path(
        is_decayed, params, is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata)
    )


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Returns the optimizer as an optax gradient transformation.

    Args:
        config: the optimizer.
        schedule: the learning rate, as from `learning_rate_schedule`.
    """
    stages = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    stages += [
        optax.scale_by_adam(
            b1=config.b1, b2=config.b2, eps=config.epsilon, mu_dtype=jnp.dtype(config.mu_dtype)
        ),
        optax.add_decayed_weights(
            config.weight_decay,
            mask=lambda params: decay_mask(params, decay_embedding=config.decay_embedding),
        ),
        optax.scale_by_learning_rate(schedule),
    ]
    return optax.chain(*stages)
