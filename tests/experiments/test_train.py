"""`python -m experiments.train` as a user meets it: restarts, signals, kills, and mistakes.

Every run is a process of its own. Those that must be equal share one cache of compiled programs, as
they would on a user's machine.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nha_jax.training.checkpoint_format import committed_steps

REPOSITORY = Path(__file__).parents[2]
CONFIG = "tests/experiments/tiny_run.py"
STEPS = 30
SAVE_EVERY = 5
KILLS = 3
# What a clock has a part in.
TIMES = ("tokens_per_second",)

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a run on a small corpus: start(workdir, "--flag=value", ...)."""
    started: list[subprocess.Popen[str]] = []
    folder = tmp_path_factory.mktemp("train")
    corpus = folder / "corpus"
    corpus.mkdir()
    words = random.Random(3)
    for name in range(12):
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(400))
        (corpus / f"{name}.txt").write_text(f"{name} {text}\n")
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }

    def run(workdir: Path, *flags: str, config: str = CONFIG) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "experiments.train", f"--config={config}"]
        command += [f"--workdir={workdir}", f"--config.data.source={corpus}", *flags]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Waits for a run to end with an exit code and returns what it printed."""
    output, errors = process.communicate(timeout=600)
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    return output if code in (0, 75, 130) else errors


def wait_for_step(process: subprocess.Popen[str], step: int) -> str:
    """Reads a run's output until it reports a step."""
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        read.append(line)
        match = re.match(r"step +(\d+)/", line)
        if match and int(match[1]) >= step:
            return "".join(read)
    raise AssertionError("the run ended early: " + "".join(read) + str(process.communicate()))


def history(workdir: Path) -> list[dict[str, object]]:
    """All lines of metrics.jsonl without what depends on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [{key: line[key] for key in line if key not in TIMES} for line in entries]


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of all steps in one process."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    output = finish(
        start(
            workdir, "--config.evaluation.sample_tokens=12", "--config.evaluation.sample_prompt=al"
        )
    )
    assert re.search(r"step 30/30 +loss \d+\.\d+ +[\d,]+ tokens/s +ETA 0s", output)
    assert re.search(r"validation at step 30: \d\.\d+ bits per byte", output)
    assert "sample:\nal" in output
    return workdir


def test_a_run_leaves_what_it_promises(undisturbed: Path) -> None:
    assert (undisturbed / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((undisturbed / "tensorboard").iterdir())
    config = json.loads((undisturbed / "config.json").read_text())
    assert config["train"]["steps"] == STEPS
    assert committed_steps(undisturbed / "checkpoints")[-1] == STEPS
    train = [line for line in history(undisturbed) if line["split"] == "train"]
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    validation = [line for line in history(undisturbed) if line["split"] == "validation"]
    assert [line["step"] for line in validation] == [10, 20, 30]
    # It learns: the corpus has four words.
    assert validation[-1]["bits_per_byte"] < validation[0]["bits_per_byte"] < 8  # type: ignore[operator]


def test_ten_and_ten_and_ten_with_two_workers_is_thirty_with_none(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    for steps in (10, 20, 30):
        workers = "--config.data.num_workers=2"
        output = finish(start(tmp_path, workers, f"--config.train.steps={steps}"))
        assert (f"Resuming {tmp_path} after step {steps - 10}" in output) == (steps > 10)
    assert history(tmp_path) == history(undisturbed)
    # Once more: there is nothing left to do.
    output = finish(start(tmp_path))
    assert f"The run in {tmp_path} is complete: step 30 of 30." in output
    assert history(tmp_path) == history(undisturbed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_goes_on(
    start: Start, undisturbed: Path, tmp_path: Path, number: int, code: int
) -> None:
    # No save is due before the last step, but for the one that the signal asks for.
    flags = ("--config.checkpoint.every_steps=1000", "--config.data.num_workers=2")
    process = start(tmp_path, *flags)
    wait_for_step(process, 3)
    process.send_signal(number)
    output = finish(process, code)
    (step,) = committed_steps(tmp_path / "checkpoints")
    assert 3 <= step < STEPS
    assert f"Stopped after step {step}" in output
    output = finish(start(tmp_path, *flags))
    assert f"Resuming {tmp_path} after step {step}" in output
    assert history(tmp_path) == history(undisturbed)


def test_killed_runs_lose_at_most_the_steps_since_the_last_save(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    moments = random.Random(7)
    committed = 0
    for _ in range(KILLS):
        process = start(tmp_path)
        output = wait_for_step(process, committed + 1)
        assert (f"Resuming {tmp_path} after step {committed}.\n" in output) == (committed > 0)
        time.sleep(moments.uniform(0, 1.0))
        process.kill()
        rest, _ = process.communicate()
        reported = [int(step) for step in re.findall(r"^step +(\d+)/.*\n", output + rest, re.M)]
        steps = committed_steps(tmp_path / "checkpoints")
        # A save is committed before the next one begins, so two intervals at most are lost.
        assert max(steps, default=0) >= max(reported) - 2 * SAVE_EVERY
        assert max(steps, default=0) >= committed
        committed = max(steps, default=0)
        if committed == STEPS:
            break
    finish(start(tmp_path))
    assert history(tmp_path) == history(undisturbed)


def test_another_model_in_the_workdir_names_what_differs(start: Start, undisturbed: Path) -> None:
    process = start(undisturbed, "--config.model.width=24", "--config.train.steps=40")
    message = finish(process, 1)
    assert "scale: found float32[1,16], expected float32[1,24]" in message
    process = start(undisturbed, "--config.model.windows=2", "--config.train.steps=40")
    message = finish(process, 1)
    assert "config.model.windows" in message
    process = start(undisturbed, "--config.data.seed=5", "--config.train.steps=40")
    assert "config.data.seed is 5, was 0" in finish(process, 1)


def test_a_gradient_that_is_never_finite_ends_the_run(start: Start, tmp_path: Path) -> None:
    # The first update makes every parameter infinite, the step after it has no finite gradient.
    flags = (
        "--config.optimizer.peak_learning_rate=1e38",
        "--config.optimizer.warmup_steps=0",
        "--config.train.max_skipped_in_a_row=3",
        "--config.evaluation.every_steps=0",
    )
    message = finish(start(tmp_path, *flags), 1)
    assert "The gradient was not finite in 3 steps in a row" in message
    assert "max_skipped_in_a_row" in message


def test_a_workdir_that_cannot_be_used_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    errors = finish(start(tmp_path), 1)
    assert (
        errors == f"error: {tmp_path}/metrics.jsonl must be a file of the run, but is a folder.\n"
    )


def test_help_shows_the_program_and_its_flags(start: Start, tmp_path: Path) -> None:
    output = finish(start(tmp_path, "--help"))
    for part in ("Trains a Native Hybrid Attention", "--config:", "--workdir:", "--config.section"):
        assert part in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--config.model.widht=3"],
            "config.model.widht is not a field of NHAConfig; did you mean config.model.width?",
        ),
        (["--config.model.num_slots=none"], "config.model.num_slots must be an integer"),
        (["--wrokdir=x"], "error: --wrokdir is not a flag; did you mean --workdir?"),
        (["--config.mesh.data=5"], "needs 5 devices, but 1 were found"),
        (["--config.data.source=/nowhere"], "/nowhere"),
        (["stray"], "'stray' is not a flag"),
        (["--config.model.implementation=pallas"], "config.model cannot run here"),
        (["--config.model.dtype=float64"], "JAX_ENABLE_X64"),
        (["--config.model.rotary_scaling.factor=2"], "config.model.rotary_scaling is None"),
    ],
)
def test_mistakes_are_one_sentence(
    start: Start, tmp_path: Path, flags: list[str], message: str
) -> None:
    errors = finish(start(tmp_path / "run", *flags), 1)
    assert message in errors
    assert errors.count("\n") == 1
    # Before anything is built.
    assert not (tmp_path / "run").exists()
