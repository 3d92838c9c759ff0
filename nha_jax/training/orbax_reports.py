"""Keeps Orbax's own reports of a failed save off the screen: the `CheckpointError` says it once.

One full disk gives some hundred lines of tracebacks from Orbax's threads and from TensorStore's
callbacks into event loops that are closed by then, and the one sentence that matters drowns.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

_ORBAX = ("/orbax/checkpoint/", "\\orbax\\checkpoint\\")


@contextlib.contextmanager
def without_failure_reports() -> Iterator[None]:
    """While entered, drops tracebacks that Orbax logs and the noise of its closed event loops."""
    absl_logger = logging.getLogger("absl")
    report_filter = _NoOrbaxTracebacks()
    absl_logger.addFilter(report_filter)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        absl_logger.removeFilter(report_filter)
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous


class _NoOrbaxTracebacks(logging.Filter):
    """Drops records with an exception that went through Orbax."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return error is None or not _went_through_orbax(error.__traceback__)


def _went_through_orbax(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if any(part in traceback.tb_frame.f_code.co_filename for part in _ORBAX):
            return True
        traceback = traceback.tb_next
    return False
