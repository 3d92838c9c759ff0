"""The folder of a run's checkpoints: committing, deleting, verifying, setting aside."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nha_jax.training import checkpoint_format as layout
from nha_jax.training.checkpoint_config import CheckpointConfig
from nha_jax.training.checkpoint_format import CheckpointError
from nha_jax.training.checkpoint_tree import check_same_tree
from nha_jax.training.integrity import (
    DamagedError,
    synchronise,
    verify_files,
    write_manifest,
)

logger = logging.getLogger(__name__)


class CheckpointFolder:
    """Files and folders only: no arrays, no threads, no other processes.

    Args:
        directory: where the steps stand.
        config: which steps to keep.
    """

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        self.directory = directory
        self.unfinished = directory / layout.UNFINISHED_FOLDER
        self._config = config

    def latest_step(self) -> int | None:
        """The last committed step, None where there is none; a save in flight does not count."""
        return max(layout.committed_steps(self.directory), default=None)

    def clear_unfinished(self) -> None:
        """Removes what a killed or failed save left, and makes the folder for the next one."""
        if self.unfinished.exists():
            shutil.rmtree(self.unfinished)
        self.unfinished.mkdir(exist_ok=True)

    def commit(self, written: Path) -> None:
        """Makes a step a checkpoint, then deletes those that it replaces.

        Args:
            written: the step's folder below `unfinished`, named like the step, that nobody writes
                to any more.

        Raises:
            OSError: hashing or moving failed; the step is not committed, nothing is deleted.
        """
        write_manifest(written)
        final = self.directory / written.name
        if final.exists():
            # Not a committed step, or `save` would have refused.
            self._set_aside(final, "it stands in the place of a new step and has no manifest")
        written.rename(final)
        synchronise(self.directory)
        try:
            self._delete_replaced()
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be deleted: %s", self.directory, error)

    def latest_sound_step(self, expected: Mapping[str, Mapping[str, Any]]) -> int | None:
        """Verifies steps from the latest back to a sound one, and sets the later ones aside.

        Args:
            expected: the leaves of the wanted train state, as `describe_tree` gives them.

        Returns:
            The step, or None where the folder holds no step at all.

        Raises:
            CheckpointMismatchError: the latest step with sound metadata is of another train state.
            CheckpointVersionError: a step has an unknown format version.
            CheckpointError: there are steps, but none is sound; they stay where they are, so that
                the next start fails too instead of training from zero.
        """
        damaged: dict[Path, str] = {}
        for step, folder in reversed(layout.step_folders(self.directory).items()):
            try:
                metadata, manifest = layout.read_metadata(folder, step)
                check_same_tree(metadata.tree, expected, folder)
                verify_files(folder, manifest)
            except DamagedError as error:
                damaged[folder] = str(error)
                continue
            for bad, reason in damaged.items():
                self._set_aside(bad, reason)
            return step
        if damaged:
            reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
            raise CheckpointError(
                f"no step in {self.directory} is sound ({reasons}): restore the folder from a "
                "copy, or remove it to start from zero"
            )
        return None

    def _delete_replaced(self) -> None:
        """Deletes the steps that are neither among the last nor among the best."""
        steps = layout.committed_steps(self.directory)
        metrics = {
            step: metadata.metrics
            for step, metadata in layout.sound_metadata(self.directory, steps).items()
        }
        best = layout.best_steps(metrics, self._config.best_metric, self._config.best_mode)
        kept = {*steps[-self._config.keep_last :], *best[: self._config.keep_best]}
        for step in steps:
            if step not in kept:
                # Away in one rename first: a kill must not leave half a step in its place.
                doomed = self.unfinished / f"deleted_{layout.step_name(step)}"
                (self.directory / layout.step_name(step)).rename(doomed)
                shutil.rmtree(doomed)

    def _set_aside(self, folder: Path, reason: str) -> None:
        """Moves an unsound step to `corrupt/`, under a name that is still free."""
        corrupt = self.directory / layout.CORRUPT_FOLDER
        try:
            corrupt.mkdir(exist_ok=True)
            target = corrupt / folder.name
            count = 1
            while target.exists():
                count += 1
                target = corrupt / f"{folder.name}-{count}"
            folder.rename(target)
        except OSError as error:
            raise CheckpointError(
                f"{folder} ({reason}) cannot be set aside in {corrupt}: {error.strerror or error}"
            ) from error
        logger.warning("%s was set aside as %s: %s", folder, target, reason)
