"""Checkpoints that can be trusted: saving in the background, verifying, restoring.

A save passes through three stages, and only the last makes it a checkpoint:

1. `Checkpointer.save` copies the state off the devices and returns; Orbax writes in the background.
2. When Orbax has finished, the files are hashed, forced to the disk, and their manifest is written.
3. One rename moves the whole step from `unfinished/` to its place, and older steps are deleted.

So whatever happens before the rename (a kill, a full disk, a power failure) leaves the previous
steps untouched and nothing in the place of the new one. `checkpoint_format` shows the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from nha_jax.training import checkpoint_format as layout
from nha_jax.training.checkpoint_config import CheckpointConfig
from nha_jax.training.checkpoint_folder import CheckpointFolder
from nha_jax.training.checkpoint_format import (
    FORMAT_VERSION,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointVersionError,
    StepMetadata,
)
from nha_jax.training.checkpoint_params import LoadedParams, load_params
from nha_jax.training.checkpoint_tree import (
    describe_tree,
    join_params,
    split_params,
    unbox,
    with_sharding,
)
from nha_jax.training.orbax_reports import without_failure_reports

__all__ = [
    "FORMAT_VERSION",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointVersionError",
    "Checkpointer",
    "LoadedParams",
    "Restored",
    "load_params",
]

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A restored train state and what was saved with it."""

    step: int
    state: Any
    run_config: dict[str, Any]
    metrics: dict[str, float]


class Checkpointer:
    """Saves and restores the train state, data position and config of one training run.

    One run owns the folder: opening it removes what a killed run left unfinished. Others read with
    `load_params`, which changes nothing. With several processes every method is called by all of
    them; process 0 alone hashes, moves and deletes.

    A save that fails in the background is raised once, as `CheckpointError`, by the next call of
    `check_for_errors`, `wait`, `save`, `restore` or `close`; then the object can be used again.

    Use it as a context manager, or call `close`: a save still in flight when the interpreter exits
    is lost.

    Args:
        directory: a local or shared folder; made if it is not there.
        config: when to save and what to keep.

    Raises:
        CheckpointError: the folder cannot be made or written.
    """

    def __init__(self, directory: str | os.PathLike[str], config: CheckpointConfig) -> None:
        self.directory = Path(directory).absolute()
        self.config = config
        self._folder = CheckpointFolder(self.directory, config)
        self._manager: ocp.CheckpointManager | None = None
        self._num_managers = 0
        self._thread: threading.Thread | None = None
        self._saving: int | None = None
        self._failure: Exception | None = None
        self._quiet = contextlib.ExitStack()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                self._folder.clear_unfinished()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {self.directory} cannot be used: {error}"
            ) from error
        _barrier("checkpoint folder cleared")
        self._quiet.enter_context(without_failure_reports())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and jax.process_count() > 1:
            # Where closing is something that all processes do together, one that fails must not
            # wait for the others, which may be gone or may not have failed.
            self._quiet.close()
            return
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # The error on its way out is what the user has to see first.
            logger.error("%s", failure)

    def should_save(self, step: int) -> bool:
        """Whether `step` is one of those that `config.every_steps` asks for."""
        return step > 0 and step % self.config.every_steps == 0

    def latest_step(self) -> int | None:
        """The last committed step, None where there is none; a save in flight does not count."""
        return self._folder.latest_step()

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_iterator: Any,
        run_config: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Saves state, data position, config and metrics as one step.

        Returns when the state has been read off the devices: the caller may donate it, and advance
        the iterator. Waits first for the save before, if that is still being written.

        Args:
            step: the optimizer step, later than every committed one.
            state: a pytree (dataclass or named tuple) of arrays with a field `params`.
            data_iterator: a Grain iterator, or None for a checkpoint without a data position.
            run_config: JSON values; `restore` and `load_params` give it back.
            metrics: metric name -> number.
            wait: return only when the step is committed.

        Raises:
            CheckpointError: this or the previous save failed, or the step is not a new one.
            TypeError: the state has no field `params`, or a leaf that is no array.
            ValueError: `run_config` is not JSON.
        """
        self.wait()
        latest = self.latest_step()
        least = 0 if latest is None else latest + 1
        if step < least:
            raise CheckpointError(
                f"step {step} cannot be saved in {self.directory}, where the next step is {least} "
                "or later: steps are saved in rising order, and none is overwritten"
            )
        metadata = self._describe(step, state, run_config, metrics)
        params, rest = split_params(unbox(state))
        items: dict[str, Any] = {}
        if data_iterator is not None:
            # Read at once, and so the first: an iterator that fails should fail before threads run.
            items["data"] = grain.checkpoint.CheckpointSave(data_iterator)
        items["params"] = ocp.args.StandardSave(params)
        items["state"] = ocp.args.StandardSave(rest)
        items["metadata"] = ocp.args.JsonSave(metadata)
        self._saving = step
        try:
            manager = self._open_manager()
            # Steps leave the manager's folder when they are committed.
            manager.reload()
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            self._failure = error
            self.check_for_errors()
        self._thread = threading.Thread(target=self._finish, args=(step,), name=f"save step {step}")
        self._thread.start()
        if wait or not self.config.asynchronous:
            self.wait()

    def check_for_errors(self) -> None:
        """Raises the failure of a save in the background, if there is one; does not wait.

        Raises:
            CheckpointError: names the step, the reason, and the last good step.
        """
        if self._failure is None:
            return
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        # Frees the disk of the half-written step, and Orbax of what it remembers of it.
        self._close_manager()
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                self._folder.clear_unfinished()
        latest = self.latest_step()
        good = "there is no earlier step" if latest is None else f"the last good step is {latest}"
        raise CheckpointError(
            f"saving step {self._saving} in {self.directory} failed, {good}: {_reason(failure)}"
        ) from failure

    def wait(self) -> None:
        """Waits until the save in flight, if any, is committed.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            _barrier("checkpoint committed")
            if self._failure is None and self._saving != self.latest_step():
                self._failure = RuntimeError("process 0 did not commit it, its error says why")
        self.check_for_errors()

    def close(self) -> None:
        """Waits for the save in flight and frees the writer.

        Raises:
            CheckpointError: that save failed.
        """
        try:
            self.wait()
        finally:
            self._close_manager()
            self._quiet.close()

    def restore(self, abstract_state: Any, *, data_iterator: Any) -> Restored | None:
        """Restores the latest sound step, and puts the data iterator to its position.

        First the metadata is compared: another tree, shape or dtype is an error, and no older step
        is tried. Then every file is verified: a step that is damaged, incomplete or stray is moved
        to `corrupt/` with a warning, and the one before is used. If no step is sound, all stay in
        their places and it is an error; training never starts from zero because of damage.

        Args:
            abstract_state: the pytree of `jax.ShapeDtypeStruct` that `save` was given arrays of;
                leaves are restored to their `sharding`, on any mesh, or else to the default device.
            data_iterator: a Grain iterator to position, or None to leave the data position unread.

        Returns:
            The step, state (buffers that may be donated), run config and metrics; None where the
            folder holds no step.

        Raises:
            CheckpointMismatchError: the checkpoint is of another model, optimizer or process count.
            CheckpointVersionError: the latest step has an unknown format version.
            CheckpointError: no step is sound, or a save in flight failed.
        """
        self.wait()
        step = self._agree(abstract_state)
        if step is None:
            return None
        folder = self.directory / layout.step_name(step)
        metadata, _ = layout.read_metadata(folder, step)
        params, rest = split_params(jax.tree.map(with_sharding, unbox(abstract_state)))
        items: dict[str, Any] = {
            "params": ocp.args.StandardRestore(params),
            "state": ocp.args.StandardRestore(rest),
        }
        data_state: Any = None
        if data_iterator is not None:
            data_state = _other_data_state(folder, data_iterator)
            if data_state is None:
                items["data"] = grain.checkpoint.CheckpointRestore(data_iterator)
        try:
            restored = self._open_manager().restore(
                step, directory=self.directory, args=ocp.args.Composite(**items)
            )
        except Exception as error:
            raise CheckpointError(f"{folder} is sound but cannot be restored: {error}") from error
        if data_state is not None:
            data_iterator.set_state(data_state)
        leaves = jax.tree.leaves(join_params(restored["params"], restored["state"]))
        del restored
        for index in range(len(leaves)):
            leaves[index] = _donatable(leaves[index])
        # Into the caller's own structure, with its partitioning boxes if it has any.
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return Restored(step, state, metadata.run_config, metadata.metrics)

    def _describe(
        self,
        step: int,
        state: Any,
        run_config: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> dict[str, Any]:
        """Returns a step's metadata as JSON values that nobody else refers to."""
        values = {name: float(value) for name, value in (metrics or {}).items()}
        if values and self.config.keep_best and self.config.best_metric not in values:
            logger.warning(
                "step %d has no metric %r to be compared by, only %s",
                step,
                self.config.best_metric,
                ", ".join(sorted(values)),
            )
        metadata = StepMetadata(
            step=step,
            run_config=dict(run_config),
            metrics=values,
            best_metric=self.config.best_metric,
            best_mode=self.config.best_mode,
            tree=describe_tree(state),
        )
        try:
            return json.loads(json.dumps(metadata.to_json()))
        except TypeError as error:
            raise ValueError(f"run_config must hold JSON values only: {error}.") from error

    def _finish(self, step: int) -> None:
        """Commits `step` when Orbax has written it; runs in the background thread."""
        try:
            assert self._manager is not None
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                self._folder.commit(Path(self._manager.directory) / layout.step_name(step))
        except Exception as error:
            self._failure = error

    def _agree(self, abstract_state: Any) -> int | None:
        """Lets process 0 choose the step to restore, and tells the others."""
        failure: CheckpointError | None = None
        choice = -2
        if jax.process_index() == 0:
            try:
                step = self._folder.latest_sound_step(describe_tree(abstract_state))
                choice = -1 if step is None else step
            except CheckpointError as error:
                failure = error
        if jax.process_count() > 1:
            choice = int(multihost_utils.broadcast_one_to_all(np.int32(choice)))
        if failure is not None:
            raise failure
        if choice == -2:
            raise CheckpointError(
                f"process 0 could not restore from {self.directory}, its error says why"
            )
        return None if choice == -1 else choice

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                step_prefix=layout.STEP_PREFIX,
                step_format_fixed_length=layout.STEP_DIGITS,
                max_to_keep=None,  # `CheckpointFolder` deletes
                save_root_metadata=False,
                # Made at once, a folder that cannot be made (a full disk) is an error at once.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            )
            # A folder of its own for each: after a failure, threads of the manager before may still
            # be writing into theirs.
            self._num_managers += 1
            folder = self._folder.unfinished / f"writer_{self._num_managers}"
            self._manager = ocp.CheckpointManager(folder, options=options)
        return self._manager

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            # The first call takes the failure, known already, so that the second gets to its end.
            with contextlib.suppress(Exception):
                manager.wait_until_finished()
            with contextlib.suppress(Exception):
                manager.close()
            # Empty unless a save failed; what that left is removed by `clear_unfinished`.
            with contextlib.suppress(OSError):
                Path(manager.directory).rmdir()


def _other_data_state(folder: Path, data_iterator: Any) -> dict[str, Any] | None:
    """The data position that another number of processes saved, where it means the same here.

    Returns:
        None where the step has this process's own position.

    Raises:
        CheckpointMismatchError: the step has none that this iterator can use.
    """
    name = f"process_{jax.process_index()}-of-{jax.process_count()}.json"
    if (folder / "data" / name).is_file():
        return None
    found = sorted((folder / "data").glob("process_*"))
    if found and getattr(data_iterator, "same_state_on_every_process", False):
        return json.loads(found[0].read_text(encoding="utf-8"))
    names = ", ".join(path.name for path in found) or "none"
    raise CheckpointMismatchError(f"{folder} has no data position {name}, found {names}")


def _donatable(array: jax.Array) -> jax.Array:
    """Returns the array in a buffer that JAX owns, which it can reuse when it is donated.

    On a CPU an array may share the memory that it was read into. Donating it then costs a copy in
    the middle of the first training step; here the copies are made one after another.
    """
    devices: set[Any] = array.devices()
    on_host = any(device.platform == "cpu" for device in devices)
    return jnp.copy(array) if on_host else array


def _reason(error: BaseException) -> str:
    """Says why a save failed, a full disk in plain words."""
    text = str(error) or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    # TensorStore wraps the operating system's error into its own text.
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text:
        return "the disk is full"
    return text.partition(" [source locations=")[0]


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
