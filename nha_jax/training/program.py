"""The compiled parts of a training run: how the state is made and how a step changes it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from nha_jax.models.language_model import NHALanguageModel
from nha_jax.training.config import RunConfig
from nha_jax.training.evaluation import EvaluationStep, make_evaluation_step
from nha_jax.training.optimizer import learning_rate_schedule, make_optimizer
from nha_jax.training.sharding import (
    LogicalRules,
    batch_sharding,
    logical_axis_rules,
    replicated,
    state_shardings,
)
from nha_jax.training.step import (
    TrainState,
    TrainStep,
    init_train_state,
    make_train_step,
    make_window_draw,
    unbox,
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A model with its jitted functions; call them inside `jax.set_mesh(mesh)`.

    Attributes:
        model: the language model.
        mesh: the devices.
        rules: the logical axis rules in force.
        abstract_state: the train state as shapes, dtypes and shardings.
        batch_sharding: how the rows of a batch are split.
        init: makes the state before the first step from the configured seed.
        train_step: (state, batch) -> (state, metrics); the state given to it is donated.
        evaluation_step: (params, batch) -> sums.
    """

    model: NHALanguageModel
    mesh: Mesh
    rules: LogicalRules
    abstract_state: TrainState
    batch_sharding: NamedSharding
    init: Callable[[], TrainState]
    train_step: TrainStep
    evaluation_step: EvaluationStep


def build_program(config: RunConfig, mesh: Mesh, byte_lengths: np.ndarray) -> Program:
    """Returns the program of a run. Nothing is computed or compiled yet.

    Args:
        config: the run.
        mesh: as from `make_mesh`.
        byte_lengths: bytes that each token id of the tokenizer stands for; ids of the model beyond
            it count 0.
    """
    model = NHALanguageModel(config.model)
    schedule = learning_rate_schedule(config.optimizer, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    rules = logical_axis_rules(mesh, config.model)
    lengths = np.zeros(config.model.vocab_size, np.int32)
    lengths[: len(byte_lengths)] = byte_lengths

    def init() -> TrainState:
        return init_train_state(model, optimizer, jax.random.key(config.train.seed))

    def with_rules(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            with nn.logical_axis_rules(rules):
                return function(*args)

        return wrapped

    boxed = jax.eval_shape(init)
    shardings = state_shardings(mesh, rules, boxed)
    abstract_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        unbox(boxed),
        shardings,
    )
    rows = batch_sharding(mesh)
    everywhere = replicated(mesh)
    train_step = make_train_step(
        model,
        optimizer,
        schedule,
        jnp.asarray(lengths),
        microbatches=config.train.microbatches,
        z_loss=config.train.z_loss,
        draw_windows=make_window_draw(choices, config.model.num_layers, config.train.seed)
        if (choices := config.train.window_choices)
        else None,
    )
    evaluation_step = make_evaluation_step(model, jnp.asarray(lengths))
    return Program(
        model=model,
        mesh=mesh,
        rules=rules,
        abstract_state=abstract_state,
        batch_sharding=rows,
        init=jax.jit(with_rules(lambda: unbox(init())), out_shardings=shardings),
        train_step=jax.jit(
            with_rules(train_step),
            in_shardings=(shardings, rows),
            out_shardings=(shardings, everywhere),
            donate_argnums=0,
        ),
        evaluation_step=jax.jit(
            with_rules(evaluation_step),
            in_shardings=(shardings.params, rows),
            out_shardings=everywhere,
        ),
    )
