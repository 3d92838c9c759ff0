"""SIGTERM and SIGINT as requests: the loop finishes its step, saves, and stops."""

import signal
import types
from typing import Self


class StopRequest:
    """While entered, SIGTERM and SIGINT set `signal_number` instead of ending the process.

    A second SIGINT ends it at once, as Ctrl-C does elsewhere. Must be entered in the main thread.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Whether the process has been asked to stop."""
        return self.signal_number is not None

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        if self.signal_number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal_number = self.signal_number or number
