"""Medians of several programs that take turns."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

Name = TypeVar("Name", bound=Hashable)


def medians(programs: Mapping[Name, Callable[[], Any]], *, rounds: int) -> dict[Name, float]:
    """Median wall time of each program in seconds.

    The programs take turns, round by round, so that what else happens on the machine falls on all
    of them alike, and ratios between them mean something on a busy machine too. Each runs once
    before the clock starts, which is when it compiles.

    Args:
        programs: By name, what to run; what it returns is waited for.
        rounds: How often each is timed.
    """
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program())
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
