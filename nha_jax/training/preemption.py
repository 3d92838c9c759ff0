"""SIGTERM and SIGINT as requests: the loop finishes its step, saves, and stops."""

import os
import signal
import types
from typing import Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """While entered, SIGTERM and SIGINT set `signal_number` instead of ending the process.

    A second SIGINT ends it at once, as Ctrl-C does elsewhere. Must be entered in the main thread.

    Where a run has several processes, a signal to any of them stops all after the same step: JAX's
    preemption service takes SIGTERM, and lets them agree on the step.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._several = jax.process_count() > 1
        self._interrupted = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        # With several processes SIGTERM is the preemption service's.
        for number in (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Whether the process has been asked to stop."""
        return self.signal_number is not None

    def agreed(self, step: int) -> bool:
        """Whether the run stops after this step; every process asks once after every step."""
        if self._several and multihost_utils.reached_preemption_sync_point(step):
            self.signal_number = signal.SIGTERM
        return bool(self)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = number == signal.SIGINT
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal_number = self.signal_number or number
