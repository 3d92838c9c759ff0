"""The iterator over batches, whose state is a batch number, and what worker processes need."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from nha_jax.data.errors import DataError

Batch = dict[str, np.ndarray]


class BatchIterator(grain.DatasetIterator[Batch]):
    """Counts batches around Grain's own iterator and starts a new one where a state says.

    Grain's states depend on the number of workers; a batch number does not. So a run may go on with
    another number of workers or processes and get the same batches.

    Args:
        make: Makes Grain's iterator from a batch number on.
        fingerprint: What decides the batches, as JSON values; a state with another one is refused.
        has_workers: Whether batches come from worker processes.
    """

    # A batch number means the same whichever part of each batch a process reads, so the state of
    # one process serves another number of processes.
    same_state_on_every_process = True

    def __init__(
        self,
        make: Callable[[int], grain.DatasetIterator],
        fingerprint: dict[str, Any],
        *,
        has_workers: bool,
    ) -> None:
        super().__init__()
        self._has_workers = has_workers
        self._workers_run = False
        self._make = make
        self._fingerprint = fingerprint
        self._next_batch = 0
        # Made on first use: a restored iterator starts its workers once.
        self._inner: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        """The next batch of this process.

        Raises:
            StopIteration: A validation pass is over.
            ValueError: The iterator is closed.
        """
        self.start_prefetch()
        assert self._inner is not None
        if self._has_workers and not self._workers_run:
            # Grain starts them with the first batch, from threads that it starts then.
            with _new_processes_without_stop_signals():
                batch = next(self._inner)
            self._workers_run = True
        else:
            batch = next(self._inner)
        self._next_batch += 1
        if self._has_workers:
            # What comes from a worker lies in shared memory, which is unmapped with its array.
            batch = {name: np.array(array, subok=False) for name, array in batch.items()}
        return batch

    def get_state(self) -> dict[str, Any]:
        """JSON values: the number of batches taken and what they were taken from."""
        return {"next_batch": self._next_batch, "fingerprint": dict(self._fingerprint)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on after `state["next_batch"]` batches.

        Raises:
            DataError: The state is of other data, or of no `BatchIterator`.
        """
        try:
            next_batch, found = state["next_batch"], dict(state["fingerprint"])
        except (KeyError, TypeError, ValueError):
            next_batch, found = None, {}
        if not isinstance(next_batch, int) or next_batch < 0:
            raise DataError("The saved data state is not one of this library's batch iterators.")
        names = sorted(self._fingerprint.keys() | found.keys())
        changed = [
            f"{name} was {found.get(name)!r} and is {self._fingerprint.get(name)!r}"
            for name in names
            if found.get(name) != self._fingerprint.get(name)
        ]
        if changed:
            raise DataError(
                "The saved data state does not belong to this data, so its batches cannot be "
                f"continued: {'; '.join(changed)}."
            )
        self._stop()
        self._next_batch = next_batch

    def start_prefetch(self) -> None:
        """Starts threads, if they are not running; workers start with the first batch."""
        self._assert_not_closed()
        if self._inner is None:
            self._inner = self._make(self._next_batch)
            if not self._has_workers:
                self._inner.start_prefetch()

    def close(self) -> None:
        """Ends threads and workers; the iterator yields nothing more."""
        self._closed = True
        self._stop()

    def __str__(self) -> str:
        return f"BatchIterator(next_batch={self._next_batch})"

    def _stop(self) -> None:
        # Grain's destructor also closes an iterator whose constructor failed.
        inner = getattr(self, "_inner", None)
        if inner is not None:
            self._inner = None
            self._workers_run = False
            inner.close()


def mark_flags_parsed() -> None:
    """Lets Grain read its absl flags in a program that does not parse flags; else workers crash."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def check_shared_memory(needed: int) -> None:
    """Refuses where shared memory is too small: a worker that finds it full dies without a word.

    Args:
        needed: Bytes of all batches that workers hold ready.

    Raises:
        DataError: `/dev/shm` has less room.
    """
    folder = Path("/dev/shm")
    if folder.is_dir() and (free := shutil.disk_usage(folder).free) < needed:
        raise DataError(
            f"Worker processes need {needed / 2**20:.0f} MiB of shared memory for batches and "
            f"{str(folder)!r} has {free / 2**20:.0f} MiB free; lower data.prefetch or "
            "data.num_workers, or make it larger."
        )


@contextlib.contextmanager
def _new_processes_without_stop_signals() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM for processes and threads that are started inside.

    A new worker imports for seconds before `start_worker` can ignore these signals, and one that
    a scheduler's SIGTERM ends in that time takes the step with it. A signal mask is inherited by
    threads and by processes, through exec too; this thread gets its own back, and with it whatever
    signal came meanwhile.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows, which has no such signals to send
        yield
        return
    # Started inside, it would unblock the signals again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(worker_index: int, worker_count: int) -> None:
    """First thing in a worker process: keep off the accelerator, and live as long as the parent.

    Args:
        worker_index: Number of the worker.
        worker_count: Number of workers.
    """
    del worker_index, worker_count
    # Nothing here computes with JAX; if some import did, it must not take the parent's GPU memory.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    # Ctrl-C and a scheduler's SIGTERM go to the whole process group; the parent still needs its
    # batches then, to finish the step and to save. It ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A parent that was killed ends nothing: Grain's worker would wait for ever.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
