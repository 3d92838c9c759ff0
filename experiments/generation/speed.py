"""Tokens per second, without what comes before the first of them: reading and compiling."""

import time
from collections.abc import Callable


class Speed:
    """Counts tokens as they come.

    Attributes:
        tokens: tokens so far.
    """

    def __init__(self, *, untimed: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing counted yet.

        Args:
            untimed: calls of `count` with which the clock does not run yet, at least 1: programs
                are compiled before the last of them.
            clock: seconds.
        """
        self._clock = clock
        self._untimed = untimed
        self._timed_from: tuple[float, int] | None = None
        self._last = 0.0
        self.tokens = 0

    def count(self, tokens: int) -> None:
        """Counts tokens that have just come."""
        self.tokens += tokens
        self._last = self._clock()
        self._untimed -= 1
        if self._untimed == 0:
            self._timed_from = self._last, self.tokens

    def seconds(self) -> float:
        """Seconds on the clock, up to the last call of `count`."""
        return 0.0 if self._timed_from is None else self._last - self._timed_from[0]

    def per_second(self) -> float | None:
        """Tokens a second on the clock; None where none were timed."""
        if self._timed_from is None or not self.seconds():
            return None
        return (self.tokens - self._timed_from[1]) / self.seconds()

    def __str__(self) -> str:
        rate = self.per_second()
        shown = "" if rate is None else f", {rate:,.1f} tokens/s"
        return f"{self.tokens:,} tokens{shown}"
