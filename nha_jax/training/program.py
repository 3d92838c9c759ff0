"""The compiled parts of a training run: how the state is made and how a step changes it."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from nha_jax.configuration import ConfigurationError
from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import NHALanguageModel, count_parameters
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


class OutOfMemoryError(Exception):
    """A device has too little memory for the run; the message is meant for the user."""


def check_dtypes(model: NHAConfig) -> None:
    """Refuses a dtype that JAX would replace by a narrower one in silence.

    Args:
        model: the model.

    Raises:
        ConfigurationError: for float64 without 64 bits enabled in JAX.
    """
    for name in ("dtype", "param_dtype"):
        if getattr(model, name) == "float64" and not jax.config.jax_enable_x64:
            raise ConfigurationError(
                f"config.model.{name} is 'float64', which JAX computes in float32 unless the "
                "environment variable JAX_ENABLE_X64=1 is set: set it, or use 'float32'."
            )


def check_program(config: RunConfig, mesh: Mesh) -> None:
    """Refuses a run whose model cannot run here or has no room, before any data is read.

    Args:
        config: the run.
        mesh: as from `make_mesh`.

    Raises:
        ConfigurationError: if the implementation cannot do the job, or the train state alone is
            larger than the memory of a device.
    """
    try:
        program = build_program(config, mesh, np.zeros(0, np.int32))
        rows = max(1, config.data.batch_size // config.train.microbatches)
        tokens = jax.ShapeDtypeStruct((rows, config.data.sequence_length), jnp.int32)
        jax.eval_shape(program.model.apply, {"params": program.abstract_state.params}, tokens)
    except NotImplementedError as error:
        raise ConfigurationError(f"config.model cannot run here: {error}") from error
    devices = mesh.local_devices
    needed = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.abstract_state)
        if leaf.dtype.itemsize
    )
    room = _memory(devices)
    if room is not None and needed > room:
        raise ConfigurationError(
            f"config.model has {count_parameters(config.model):,} parameters: with the optimizer's "
            f"moments they take {needed / 2**30:,.1f} GiB on each device, of {room / 2**30:,.1f} "
            "GiB; use a smaller model, or more devices with config.mesh.fsdp or config.mesh.tensor."
        )


def _memory(devices: Sequence[jax.Device]) -> float | None:
    """Bytes that each of these devices of one process has; None where that is not known."""
    if devices[0].platform == "cpu":
        if not hasattr(os, "sysconf"):
            return None
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")


@contextlib.contextmanager
def out_of_memory_errors(config: RunConfig) -> Iterator[None]:
    """Turns what JAX raises where memory ends into one sentence that says what can be lowered.

    Args:
        config: the run.

    Raises:
        OutOfMemoryError: for such an error inside the block.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        text = str(error)
        is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text
        if not is_memory and "Out of memory" not in text:
            raise
        first = text.splitlines()[0] if text else "MemoryError"
        raise OutOfMemoryError(
            f"The memory of a device does not hold the run ({first}): lower config.data.batch_size "
            f"(now {config.data.batch_size}), raise config.train.microbatches (now "
            f"{config.train.microbatches}), set config.model.remat (now {config.model.remat!r}) to "
            "'full', or use more devices."
        ) from error


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
