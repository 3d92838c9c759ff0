"""The folder of a run: whether it can be used, who uses it, and what to say where it cannot."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOSS_FILE = "loss.png"
LOCK_FILE = "lock"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"

_logger = logging.getLogger(__name__)


class WorkdirError(Exception):
    """The folder of a run cannot be used; the message is one sentence meant for the user."""


def check_workdir(workdir: Path) -> None:
    """Refuses a folder that a run could not write to; makes and changes nothing.

    Args:
        workdir: the folder, which need not exist.

    Raises:
        WorkdirError: it or a part of it is no folder, no file, or not writable.
    """
    for name in ("", CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER):
        path = workdir / name
        if os.path.lexists(path) and not path.is_dir():
            raise WorkdirError(f"{path} must be a folder of the run, but is a file.")
    for name in (CONFIG_FILE, METRICS_FILE, LOSS_FILE, LOCK_FILE):
        path = workdir / name
        if path.exists() and not path.is_file():
            raise WorkdirError(f"{path} must be a file of the run, but is a folder.")
    existing = workdir.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise WorkdirError(f"{workdir} cannot be made: {existing} is no folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise WorkdirError(f"{workdir} cannot be written: no permission to write in {existing}.")


@contextlib.contextmanager
def hold_workdir(workdir: Path) -> Iterator[None]:
    """Makes the folder and keeps every other process out of it, until the block or process ends.

    Args:
        workdir: the folder of the run.

    Raises:
        WorkdirError: another process trains in it, or it cannot be made.
    """
    path = workdir / LOCK_FILE
    with write_errors(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            # Goes with the process, however it ends, and stays out of its workers: spawned
            # processes inherit no files.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise WorkdirError(
                f"{workdir} is in use by {owner}: two runs in one folder would destroy each "
                "other's checkpoints; wait for it, stop it, or give another --workdir."
            ) from None
        except OSError as error:  # a file system without locks
            _logger.warning("%s cannot be locked (%s); nothing else may train there", path, error)
        with write_errors(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
        yield


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into one sentence about a file or folder.

    Args:
        path: what is being written.

    Raises:
        WorkdirError: for an `OSError` inside the block.
    """
    try:
        yield
    except OSError as error:
        raise WorkdirError(f"{path} cannot be written: {error.strerror or error}.") from error
