"""The progress line: rewritten in place on a terminal, one line after the other in a log."""

import sys
import time
import unicodedata
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Prints steps, loss, throughput and the time that is left.

    Time spent between `pause` and `resume` (evaluations, saves) counts neither for the throughput
    nor for the time that is left, and neither does compiling, which ends with the first step.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts counting.

        Args:
            total_steps: steps of the whole run.
            stream: where to print; None is standard output.
            quiet: print nothing, because another process of the run does.
            clock: seconds.
        """
        self._stream = sys.stdout if stream is None else stream
        self._quiet = quiet
        self._in_place = self._stream.isatty()
        self._line_open = False
        self._total = total_steps
        self._clock = clock
        self._start: float | None = None
        self._paused_at: float | None = None
        self._first_timed = 0
        self._interval_tokens = 0.0
        self._interval_start: float | None = None
        self._tokens_per_second: float | None = None

    def step_done(self, step: int, tokens: float) -> None:
        """Counts a finished step. The first one starts the clock: it had the compiling in it."""
        if self._start is None:
            self._start = self._interval_start = self._clock()
            self._first_timed = step
        else:
            self._interval_tokens += tokens

    def pause(self) -> None:
        """Stops the clock."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Lets the clock go on."""
        if (
            self._paused_at is not None
            and self._start is not None
            and self._interval_start is not None
        ):
            away = self._clock() - self._paused_at
            self._start += away
            self._interval_start += away
        self._paused_at = None

    def tokens_per_second(self) -> float | None:
        """Returns the throughput since the last call; None until a step has been timed."""
        if self._interval_start is None or not self._interval_tokens:
            return self._tokens_per_second
        now = self._clock()
        elapsed = now - self._interval_start
        self._tokens_per_second = self._interval_tokens / elapsed if elapsed > 0 else None
        self._interval_tokens, self._interval_start = 0.0, now
        return self._tokens_per_second

    def show(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Prints the progress line of a step."""
        if self._quiet:
            return
        done = step - self._first_timed
        left = "?"
        if self._start is not None and done > 0:
            seconds = (self._clock() - self._start) / done * (self._total - step)
            left = _duration(seconds)
        rate = "?" if tokens_per_second is None else f"{tokens_per_second:,.0f}"
        width = len(str(self._total))
        line = f"step {step:>{width}}/{self._total}  loss {loss:.4f}  {rate} tokens/s  ETA {left}"
        if self._in_place:
            # Back to the start of the line, and clear what a longer line left.
            self._stream.write(f"\r{line}\x1b[K")
            self._line_open = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def message(self, text: str) -> None:
        """Prints a line of its own."""
        if self._quiet:
            return
        self._stream.write(("\n" if self._line_open else "") + text + "\n")
        self._stream.flush()
        self._line_open = False


def printable(text: str) -> str:
    """Returns the text without what would command a terminal: control characters but line ends."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\ufffd" for char in text
    )


def _duration(seconds: float) -> str:
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{total % 60:02d}s"
    return f"{total}s"
