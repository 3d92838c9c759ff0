"""Where metrics go: metrics.jsonl, TensorBoard, and the model's floating point operations.

metrics.jsonl has one JSON object a line, with "step" and "split" ("train" or "validation"); a
resumed run continues the file as if it had never stopped.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from nha_jax.models.config import NHAConfig
from nha_jax.training.workdir import METRICS_FILE, TENSORBOARD_FOLDER, write_errors

# Dense bfloat16 peaks in floating point operations a second, from the makers' data sheets. A name
# stands in a device's kind, as JAX reports it, as words of its own; the first one found counts.
_PEAK_FLOPS = (
    ("B200", 2250e12),
    ("GB200", 2500e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("TPU v6 lite", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v5p", 459e12),
    ("TPU v4", 275e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Returns the bfloat16 peak of a device in operations a second; None for an unknown kind.

    Args:
        device_kind: such as "NVIDIA H200", the `device_kind` of a JAX device.
    """
    words = f" {device_kind.replace('-', ' ')} "
    return next((peak for name, peak in _PEAK_FLOPS if f" {name} " in words), None)


def training_flops_per_token(model: NHAConfig, num_parameters: int, length: int) -> float:
    """Returns the floating point operations that training on one token takes, on average in a row.

    That is 6 for each parameter that a token is multiplied with (2 forward, 4 backward; an untied
    embedding is only looked up), and for attention 6 for each of the H + V products with every key
    and value that a query sees: the window's keys before the token and itself, and M slots, plus
        the writing of the slots. It counts what
    the method needs, not what an implementation spends, and no recomputation by `remat`.

    Args:
        model: the model.
        num_parameters: its number of parameters.
        length: tokens in a row (T), taken as one document.
    """
    assert model.value_width is not None
    matrix_parameters = num_parameters
    if not model.tie_embeddings:
        matrix_parameters -= model.vocab_size * model.width
    widths = model.key_width + model.value_width
    attention = 0.0
    for window in model.layer_windows:
        reach = length if window is None else min(window, length)
        # Mean of min(t, reach) over t = 1 .. length.
        keys = (reach * (reach + 1) / 2 + (length - reach) * reach) / length
        slots = 0 if window is None else model.num_slots
        attention += model.num_heads * (keys + slots) * widths
        attention += model.num_kv_heads * slots * widths
    return 6.0 * (matrix_parameters + attention)


def to_plain(value: Any) -> Any:
    """Returns a scalar or array as a number or list for JSON; what is not finite becomes None."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        value = np.asarray(value).tolist()
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class MetricsWriter:
    """Appends metrics to `metrics.jsonl` and, if wanted, to TensorBoard files.

    Opening it for a run that resumes at `step` drops what a killed process had written beyond that
    step, a half-written last line included, so that no step has two lines and none is lost.
    """

    def __init__(self, workdir: Path, step: int, *, tensorboard: bool = True) -> None:
        """Opens the files.

        Args:
            workdir: folder of the run.
            step: steps done; lines of later steps are removed.
            tensorboard: whether to write TensorBoard files as well.

        Raises:
            WorkdirError: if a file cannot be written, here or later.
        """
        self.path = workdir / METRICS_FILE
        with write_errors(self.path):
            _truncate(self.path, step)
            self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = None
        if tensorboard:
            folder = workdir / TENSORBOARD_FOLDER
            with write_errors(folder):
                self._tensorboard = SummaryWriter(
                    logdir=str(folder), purge_step=step + 1, flush_secs=30
                )

    def write(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Writes the metrics of a step.

        Args:
            step: the step that they belong to.
            split: "train" or "validation".
            values: numbers, or arrays [L] with one number a layer.
        """
        plain = {name: to_plain(value) for name, value in values.items()}
        with write_errors(self.path):
            self._file.write(json.dumps({"step": step, "split": split, **plain}) + "\n")
            # Out of the process at once: kill -9 loses nothing that was written.
            self._file.flush()
        if self._tensorboard is not None:
            for name, value in plain.items():
                series = value if isinstance(value, list) else [value]
                for index, number in enumerate(series):
                    suffix = f"/layer_{index:02d}" if isinstance(value, list) else ""
                    if number is not None:
                        self._tensorboard.add_scalar(f"{split}/{name}{suffix}", number, step)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


class NoMetrics:
    """Stands for a `MetricsWriter` where another process writes; `path` is that of no file."""

    path = Path(os.devnull)

    def write(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Closes nothing."""


def read_metrics(path: Path, split: str) -> list[dict[str, Any]]:
    """Returns the lines of a split in metrics.jsonl, in the order of steps, if any."""
    if not path.exists():
        return []
    entries = [_entry(line) for line in path.read_bytes().splitlines()]
    return [entry for entry in entries if entry is not None and entry["split"] == split]


def _entry(line: bytes) -> dict[str, Any] | None:
    """The metrics in a line; None for one that this library did not write."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    known = isinstance(entry, dict) and isinstance(entry.get("step"), int) and "split" in entry
    return entry if known else None


def _truncate(path: Path, step: int) -> None:
    """Keeps the leading complete lines of steps up to `step`."""
    if not path.exists():
        return
    content = path.read_bytes()
    kept = []
    for line in content.splitlines(keepends=True):
        entry = _entry(line)
        if entry is not None and line.endswith(b"\n") and entry["step"] <= step:
            kept.append(line)
    if b"".join(kept) != content:
        temporary = path.with_suffix(".jsonl.tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)  # noqa: PTH105 - the atomic one
