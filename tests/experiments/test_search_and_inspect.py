"""`experiments.search_windows` and `experiments.inspect` on a checkpoint: files and resuming."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.checkpoints import read_windows
from experiments.command_line import load_config
from nha_jax.configuration import from_mapping
from nha_jax.ops.windows import format_windows
from nha_jax.training.config import RunConfig
from tests.experiments.tiny_checkpoint import MODEL, QUICK_TO_COMPILE, save_checkpoint

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "run")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = random.Random(0)
    path.write_text(" ".join(words.choice(["alpha", "beta", "gamma"]) for _ in range(60)))
    return path


def _run(name: str, *flags: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *flags],
        cwd=REPOSITORY,
        env=os.environ | QUICK_TO_COMPILE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return run


def test_a_search_goes_on_where_it_stopped_and_its_choice_can_be_used(
    checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "search"
    flags = [f"--checkpoint={checkpoint}", f"--output={output}", f"--text={text}"]
    flags += ["--choices=2,full", "--budget=0.6", "--context=500", "--max_batches=2"]
    first = _run("search_windows", *flags)
    log = output / "evaluated.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines]
    # Of four settings, full attention in both layers is beyond the budget.
    assert {entry["windows"] for entry in entries} == {"2", "full,2@1", "2,full@1"}
    assert all(entry["cost"]["state_bytes"] > 0 for entry in entries)
    best = min(entries, key=lambda entry: entry["metrics"]["ppl"])
    assert f"chosen: {best['windows']}" in first.stdout
    assert (output / "pareto.png").read_bytes().startswith(b"\x89PNG")

    chosen = output / "chosen.py"
    config = from_mapping(RunConfig, load_config(RunConfig, chosen).to_dict())
    assert format_windows(config.model.layer_windows) == best["windows"]
    assert config.data.sequence_length == 32
    assert format_windows(read_windows(str(chosen), MODEL)) == best["windows"]

    # Killed while it wrote its third line.
    log.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    again = _run("search_windows", *flags)
    assert log.read_bytes() == b"".join(lines)
    assert again.stdout == first.stdout
    assert again.stderr.count("of the bytes") == 1
    refused = _run("search_windows", *flags, "--context=600", code=1)
    assert "a search with other settings (context)" in refused.stderr


def test_a_search_for_recall(checkpoint: Path, tmp_path: Path) -> None:
    flags = [f"--checkpoint={checkpoint}", f"--output={tmp_path / 'new'}", "--metric=recall"]
    flags += ["--choices=2,8,full", "--max_exhaustive=1", "--recall_rows=2", "--recall_pairs=4"]
    run = _run("search_windows", *flags, "--budget=1", "--beam=2")
    assert "accuracy" in run.stdout
    lines = (tmp_path / "new" / "evaluated.jsonl").read_text().splitlines()
    windows = [json.loads(line)["windows"] for line in lines]
    assert len(windows) == len(set(windows)) >= 5
    assert {"2", "full"} <= set(windows)


def test_inspection_prints_and_writes_every_layer(
    checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    flags = [f"--checkpoint={checkpoint}", f"--text={text}", f"--output={tmp_path}"]
    run = _run("inspect", *flags, "--windows=8,full@0", "--context=1000", "--max_tokens=50")
    assert "50 tokens of" in run.stdout
    first, second = json.loads((tmp_path / "memories.json").read_text())["layers"]
    assert (first["window"], second["window"]) == ("full", "8")
    assert first["slot_share"] == 0 < second["slot_share"] < 1
    assert "half_life_quantiles" not in first
    low, middle, high = second["half_life_quantiles"]
    assert 0 < low <= middle <= high
    assert first["state_bytes"] == first["state_bytes_full_attention"] > 10 * second["state_bytes"]
    assert (tmp_path / "slot_share.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("search_windows", ["--output=x", "--budget=2"], "--budget is 2.0"),
        ("search_windows", ["--output=x", "--choices=4,none"], "--choices: A window is 'none'"),
        ("inspect", [], "--text is missing"),
    ],
)
def test_mistakes_are_one_sentence(name: str, flags: list[str], message: str) -> None:
    run = _run(name, "--checkpoint=x", *flags, code=1)
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
