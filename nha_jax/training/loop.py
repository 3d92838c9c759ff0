"""A training run: mesh, abstract init, shardings, jitted init or restore, and the loop."""

import contextlib
import enum
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax

from nha_jax.configuration import to_mapping
from nha_jax.data.pipeline import TextData, open_data
from nha_jax.inference.generate import generate
from nha_jax.inference.sampling import Sampling
from nha_jax.models.language_model import count_parameters
from nha_jax.ops.windows import format_windows
from nha_jax.training.checkpoint import Checkpointer
from nha_jax.training.checkpoint_format import committed_steps, read_metadata, step_name
from nha_jax.training.config import RunConfig, check_resumable
from nha_jax.training.distributed import check_agreement, check_platform, from_first
from nha_jax.training.evaluation import evaluate
from nha_jax.training.integrity import DamagedError
from nha_jax.training.metrics import (
    MetricsWriter,
    NoMetrics,
    peak_flops,
    read_metrics,
    training_flops_per_token,
)
from nha_jax.training.plot import plot_loss
from nha_jax.training.preemption import StopRequest
from nha_jax.training.program import (
    Program,
    build_program,
    check_dtypes,
    check_program,
    out_of_memory_errors,
)
from nha_jax.training.progress import Progress, printable
from nha_jax.training.sharding import check_divisible, make_mesh, process_rows, put_batch
from nha_jax.training.step import Metrics, TrainState
from nha_jax.training.workdir import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOSS_FILE,
    check_workdir,
    hold_workdir,
    write_errors,
)


class Outcome(enum.Enum):
    """How a run ended."""

    COMPLETE = "complete"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


def train(config: RunConfig, workdir: Path) -> Outcome:
    """Trains until `config.train.steps`, from the last checkpoint in the workdir if there is one.

    The workdir gets `config.json`, `metrics.jsonl`, `checkpoints/`, `tensorboard/` and, at the end,
    `loss.png`. On SIGTERM or SIGINT the run saves and returns early; calling it again goes on, with
    the same batches and losses as if it had not stopped.

    Args:
        config: the run.
        workdir: folder of the run; made if it does not exist.

    Returns:
        How the run ended.

    Raises:
        ConfigurationError: if the configuration does not fit the devices or the run in the workdir.
        DataError: if the data cannot be used.
        WorkdirError: if the workdir cannot be written, or another process trains in it.
        CheckpointError: if a checkpoint cannot be restored or saved.
        OutOfMemoryError: if a device has too little memory.
        TrainingDivergedError: if the gradient was not finite too many times in a row.
    """
    check_platform(os.environ)
    check_agreement(to_mapping(config))
    mesh = make_mesh(config.mesh)
    check_divisible(
        mesh,
        config.model,
        config.data.batch_size,
        config.train.microbatches,
        config.data.sequence_length,
    )
    check_dtypes(config.model)
    check_workdir(workdir)
    checkpoints = workdir / CHECKPOINTS_FOLDER
    _check_saved_config(config, checkpoints)
    with StopRequest() as stop, out_of_memory_errors(config):
        check_program(config, mesh)
        data_index, data_count = process_rows(mesh, config.data.batch_size)
        data = open_data(
            config.data,
            vocab_size=config.model.vocab_size,
            process_index=data_index,
            process_count=data_count,
        )
        program = build_program(config, mesh, data.tokenizer.token_byte_lengths())
        # Made only now: a mistake in the data leaves no folder behind.
        with (
            # Process 0 writes all files but its checkpoint shards.
            hold_workdir(workdir) if jax.process_index() == 0 else contextlib.nullcontext(),
            Checkpointer(checkpoints, config.checkpoint) as checkpointer,
            jax.set_mesh(mesh),
        ):
            return _Run(config, workdir, program, data, checkpointer, stop).execute()


class _Run:
    """One call of `train`, so that its parts can be read one by one."""

    def __init__(
        self,
        config: RunConfig,
        workdir: Path,
        program: Program,
        data: TextData,
        checkpointer: Checkpointer,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.run_config = to_mapping(config)
        self.workdir = workdir
        self.program = program
        self.data = data
        self.checkpointer = checkpointer
        self.stop = stop
        self.is_first = jax.process_index() == 0
        self.progress = Progress(config.train.steps, quiet=not self.is_first)
        self.num_parameters = count_parameters(config.model)
        self.flops_per_token = training_flops_per_token(
            config.model, self.num_parameters, config.data.sequence_length
        )
        devices = program.mesh.devices.flat
        peak = config.train.peak_flops or peak_flops(devices[0].device_kind)
        self.peak_flops = None if peak is None else peak * len(devices)

    def execute(self) -> Outcome:
        """Restores or begins, trains, and finishes."""
        with contextlib.closing(self.data.train.iterator()) as iterator:
            restored = self.checkpointer.restore(
                self.program.abstract_state, data_iterator=iterator
            )
            if restored is None:
                step, state = 0, self.program.init()
            else:
                step, state = restored.step, restored.state
                for note in check_resumable(
                    restored.run_config, self.run_config, str(self.workdir)
                ):
                    self.progress.message(note)
            # A buffer that is donated must have no other owner.
            del restored
            complete_before = step >= self.config.train.steps
            if not complete_before and self.is_first:
                self._write_config()
            with contextlib.closing(
                MetricsWriter(self.workdir, step, tensorboard=self.config.train.tensorboard)
                if self.is_first
                else NoMetrics()
            ) as metrics:
                self.metrics = metrics
                self._describe(step)
                if self._is_evaluation_step(step) and not self._was_evaluated(step):
                    # The process before this one saved the step, but was stopped before evaluating.
                    self._evaluate(step, state)
                step, state = self._loop(step, state, iterator)
        if self.stop:
            self.progress.message(
                f"Stopped after step {step}; the same command goes on from there."
            )
            interrupted = self.stop.signal_number == signal.SIGINT
            return Outcome.INTERRUPTED if interrupted else Outcome.PREEMPTED
        self._finish(step, state, sample=not complete_before)
        return Outcome.COMPLETE

    def _write_config(self) -> None:
        """Writes the configuration as JSON, whole or not at all."""
        path = self.workdir / CONFIG_FILE
        temporary = path.with_suffix(".json.tmp")
        with write_errors(path):
            text = json.dumps(self.run_config, indent=2) + "\n"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)

    def _loop(self, step: int, state: TrainState, iterator: Any) -> tuple[int, TrainState]:
        """Trains to the last step, or until the process is asked to stop and the state is saved."""
        pending: tuple[int, Metrics] | None = None
        while step < self.config.train.steps:
            batch = put_batch(next(iterator), self.program.batch_sharding)
            state, metrics = self.program.train_step(state, batch)
            # Ordered here, so that the copy to the host need not queue behind the next step.
            jax.tree.map(lambda metric: metric.copy_to_host_async(), metrics)
            step += 1
            # The step now runs on the device. Only now the one before it is read, so that the
            # device has work while the host reads, prints and prepares the next batch.
            if pending is not None:
                self._report(*pending)
            pending = step, metrics
            is_last = step == self.config.train.steps
            is_stop = self.stop.agreed(step)
            is_evaluation = self._is_evaluation_step(step) and not is_stop
            is_save = self.checkpointer.should_save(step) or is_last or is_stop
            if is_evaluation or is_save:
                # A saved step has its metrics on disk: a resumed run does not write them again.
                self._report(*pending)
                pending = None
                self.progress.pause()
                results = self._evaluate(step, state) if is_evaluation else None
                is_stop = bool(self.stop)
                if is_save or is_stop:
                    self.checkpointer.save(
                        step,
                        state,
                        data_iterator=iterator,
                        run_config=self.run_config,
                        metrics=results,
                        wait=is_last or is_stop,
                    )
                self.progress.resume()
                if is_stop:
                    break
            self.checkpointer.check_for_errors()
        return step, state

    def _report(self, step: int, metrics: Metrics) -> None:
        """Reads the metrics of a step, waiting for it if need be, and passes them on."""
        values = jax.device_get(metrics)
        self.progress.step_done(step, float(values["targets"]))
        in_a_row = int(values["skipped_in_a_row"])
        limit = self.config.train.max_skipped_in_a_row
        if in_a_row:
            self.progress.message(
                f"Step {step}: the gradient is not finite, so its update was skipped "
                f"({in_a_row} in a row, {limit} end the run)."
            )
        is_log = step % self.config.train.log_every_steps == 0
        if is_log or step == self.config.train.steps or in_a_row >= limit:
            rate = self.progress.tokens_per_second()
            self.progress.show(step, float(values["loss"]), rate)
            if is_log:
                values["tokens_per_second"] = rate
                if self.peak_flops is not None and rate is not None:
                    values["mfu"] = rate * self.flops_per_token / self.peak_flops
                self.metrics.write(step, "train", values)
        if in_a_row >= limit:
            self.checkpointer.wait()
            saved = self.checkpointer.latest_step()
            kept = "no checkpoint was saved yet" if saved is None else f"step {saved} is saved"
            raise TrainingDivergedError(
                f"The gradient was not finite in {in_a_row} steps in a row, the last of them step "
                f"{step} (train.max_skipped_in_a_row is {limit}); {kept}."
            )

    def _is_evaluation_step(self, step: int) -> bool:
        every = self.config.evaluation.every_steps
        due = step == self.config.train.steps or (every > 0 and step % every == 0)
        return self.data.validation is not None and step > 0 and due

    def _was_evaluated(self, step: int) -> bool:
        lines = read_metrics(self.metrics.path, "validation")
        return from_first(any(line["step"] == step for line in lines))

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float] | None:
        """Evaluates and reports; returns metrics to save with the step, None if asked to stop."""
        assert self.data.validation is not None
        with contextlib.closing(self.data.validation.iterator()) as batches:
            results = evaluate(
                self.program.evaluation_step,
                state.params,
                batches,
                self.program.batch_sharding,
                max_batches=self.config.evaluation.max_batches,
                should_stop=lambda: bool(self.stop),
            )
        if results is None:
            return None
        self.metrics.write(step, "validation", results)
        self.progress.message(
            f"validation at step {step}: {results['bits_per_byte']:.4f} bits per byte, "
            f"loss {results['loss']:.4f}"
        )
        return {f"validation/{name}": results[name] for name in ("bits_per_byte", "loss")}

    def _describe(self, step: int) -> None:
        """Prints what is about to be trained, where, and on what."""
        model, mesh = self.config.model, self.program.mesh
        kind = mesh.devices.flat[0].device_kind
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        self.progress.message(
            f"model: {self.num_parameters:,} parameters, {model.num_layers} layers of width "
            f"{model.width}, windows {format_windows(model.layer_windows)}, {model.num_slots} slots"
        )
        self.progress.message(f"devices: {mesh.size} x {kind} ({axes})")
        self.progress.message(f"data: {self.data.report}")
        if step >= self.config.train.steps:
            self.progress.message(
                f"The run in {self.workdir} is complete: step {step} of {self.config.train.steps}."
            )
        elif step:
            self.progress.message(f"Resuming {self.workdir} after step {step}.")

    def _finish(self, step: int, state: TrainState, *, sample: bool) -> None:
        """Writes the loss curve, and prints the last evaluation and a sample.

        The sample is made by single processes only: `generate` wants parameters that one process
        holds.
        """
        image = self.workdir / LOSS_FILE
        title = f"{self.num_parameters:,} parameters, windows "
        title += format_windows(self.config.model.layer_windows)
        with write_errors(image):
            if self.is_first and plot_loss(self.metrics.path, image, title):
                self.progress.message(f"loss curve: {image}")
        evaluation = self.config.evaluation
        if sample and evaluation.sample_tokens and jax.process_count() == 1:
            tokenizer = self.data.tokenizer
            (sample_of_run,) = generate(
                self.program.model,
                state.params,
                [[tokenizer.bos_id, *tokenizer.encode(evaluation.sample_prompt)]],
                max_tokens=evaluation.sample_tokens,
                sampling=Sampling(
                    temperature=evaluation.sample_temperature, seed=self.config.train.seed
                ),
                end_ids=(),
            )
            text = tokenizer.decode(sample_of_run.tokens)
            self.progress.message(f"sample:\n{evaluation.sample_prompt}{printable(text)}")
        for line in read_metrics(self.metrics.path, "validation"):
            if line["step"] == step:
                bits = line["bits_per_byte"]  # None where it was not a finite number
                shown = "not a number of" if bits is None else f"{bits:.4f}"
                self.progress.message(f"final validation loss: {shown} bits per byte")


def _check_saved_config(config: RunConfig, directory: Path) -> None:
    """Refuses to go on with other data, before anything is built.

    The model is left to the comparison of the checkpoint's arrays, which names those that differ.
    """
    for step in reversed(committed_steps(directory)):
        try:
            saved, _ = read_metadata(directory / step_name(step), step)
        except DamagedError:
            continue
        check_resumable(
            saved.run_config, to_mapping(config), str(directory.parent), ignore=("model",)
        )
        return
