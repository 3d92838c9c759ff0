"""metrics.jsonl across restarts, operation counts, the progress line, and the curve."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nha_jax.training.metrics import (
    MetricsWriter,
    peak_flops,
    read_metrics,
    training_flops_per_token,
)
from nha_jax.training.plot import plot_loss
from nha_jax.training.progress import Progress
from tests.training.tiny import tiny_config


def _write(writer: MetricsWriter, step: int) -> None:
    writer.write(step, "train", {"loss": np.float32(step), "slot_share": np.ones(2, np.float32)})


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, tensorboard=False)
    for step in range(1, 8):
        _write(writer, step)
    writer.close()
    # A process killed in the middle of a line.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "split": "tr')
    writer = MetricsWriter(tmp_path, 5, tensorboard=False)
    for step in range(6, 10):
        _write(writer, step)
    writer.close()
    lines = read_metrics(tmp_path / "metrics.jsonl", "train")
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[0] == {"step": 1, "split": "train", "loss": 1.0, "slot_share": [1.0, 1.0]}
    assert read_metrics(tmp_path / "metrics.jsonl", "validation") == []


def test_metrics_are_valid_json_and_survive_the_process(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, tensorboard=False)
    writer.write(1, "train", {"loss": np.float32(np.nan), "z": np.asarray([1.0, np.inf])})
    # Not closed: what was written is in the file all the same.
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "split": "train", "loss": None, "z": [1.0, None]}
    writer.close()


def test_tensorboard_has_a_series_for_each_layer(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, tensorboard=True)
    _write(writer, 3)
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    for name in (b"train/loss", b"train/slot_share/layer_00", b"train/slot_share/layer_01"):
        assert name in content


def test_training_flops_count_what_each_token_meets() -> None:
    changes = {"model.num_layers": 2, "model.windows": "4,full@1", "model.tie_embeddings": False}
    model = tiny_config(**changes).model
    length, parameters = 8, 10_000
    # Keys seen by tokens 1 to 8 in a window of 4, and in full attention.
    windowed = np.mean([1, 2, 3, 4, 4, 4, 4, 4])
    full = np.mean(np.arange(1, 9))
    reads = 4 * (8 + 8) * (windowed + 4 + full)
    writes = 2 * 4 * (8 + 8)
    expected = 6 * (parameters - 260 * 16 + reads + writes)
    found = training_flops_per_token(model, parameters, length)
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("TPU v5 lite", 197),
    ],
)
def test_peaks_of_known_devices(kind: str, teraflops: float) -> None:
    assert peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L40", "NVIDIA GeForce RTX 3090", ""])
def test_other_devices_have_no_peak(kind: str) -> None:
    assert peak_flops(kind) is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_line(terminal: bool) -> None:
    stream = _Terminal() if terminal else io.StringIO()
    clock = _Clock()
    progress = Progress(104, stream=stream, clock=clock)
    clock.now = 50.0  # compiling
    progress.step_done(1, 100)
    assert progress.tokens_per_second() is None
    progress.show(1, 5.0, None)
    for step in (2, 3, 4):
        clock.now += 2.0
        progress.step_done(step, 100)
    progress.pause()
    clock.now += 1000.0  # evaluating
    progress.resume()
    progress.show(4, 2.5, progress.tokens_per_second())
    progress.message("done")
    written = stream.getvalue()
    first = "step   1/104  loss 5.0000  ? tokens/s  ETA ?"
    second = "step   4/104  loss 2.5000  50 tokens/s  ETA 3m20s"
    if terminal:
        assert written == f"\r{first}\x1b[K\r{second}\x1b[K\ndone\n"
    else:
        assert written == f"{first}\n{second}\ndone\n"


def test_loss_curve(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    image = tmp_path / "loss.png"
    assert not plot_loss(metrics, image, "none")
    assert not image.exists()
    lines: list[dict[str, Any]] = [
        {"step": step, "split": "train", "bits_per_byte": 8 / step} for step in (1, 2, 3)
    ]
    lines += [{"step": 3, "split": "validation", "bits_per_byte": 4}]
    lines += [{"step": 4, "split": "train", "bits_per_byte": None}]
    # Lines that something else wrote there are passed over.
    junk = 'not json\n[1]\n{"step": 1}\n\n'
    metrics.write_text(junk + "".join(json.dumps(line) + "\n" for line in lines))
    assert [line["step"] for line in read_metrics(metrics, "train")] == [1, 2, 3, 4]
    assert plot_loss(metrics, image, "tiny")
    assert image.read_bytes().startswith(b"\x89PNG")
