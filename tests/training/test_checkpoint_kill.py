"""`kill -9` at random moments of saving loses no committed step and changes no number."""

import random
import subprocess
import sys
import time
from pathlib import Path

from nha_jax.training.checkpoint_format import committed_steps
from tests.training.checkpoint_killed_run import undisturbed

REPOSITORY = Path(__file__).parents[2]
KILLS = 5
UNREACHABLE = 1_000_000


def start(directory: Path, last_step: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training.checkpoint_killed_run"]
    return subprocess.Popen(
        [*command, str(directory), str(last_step)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


def numbers(output: str, word: str) -> list[int]:
    """The steps in the whole lines `WORD STEP` of a run's output."""
    lines = [line.split() for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return [int(line[1]) for line in lines if line[0] == word]


def test_killed_runs_lose_no_committed_step(tmp_path: Path) -> None:
    moments = random.Random(20_26)
    committed = 0
    for _ in range(KILLS):
        run = start(tmp_path, UNREACHABLE)
        assert run.stdout is not None
        first = run.stdout.readline()
        # Saves follow each other without a pause, so that any moment is inside one.
        time.sleep(moments.uniform(0.0, 0.8))
        run.kill()
        output = first + run.communicate()[0]
        (restored,) = numbers(output, "restored")
        assert restored >= committed
        committed = max([committed, *numbers(output, "committed")])
        assert max(committed_steps(tmp_path), default=0) >= committed
    assert committed > 0
    last_step = max(committed_steps(tmp_path)) + 2
    run = start(tmp_path, last_step)
    output, _ = run.communicate()
    assert run.returncode == 0
    assert numbers(output, "restored") >= [committed]
    assert output.splitlines()[-1] == f"done {undisturbed(last_step)}"
    # Nothing that a kill left behind was ever taken for damage.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_{last_step - 1:08d}",
        f"step_{last_step:08d}",
        "unfinished",
    ]
    assert not list((tmp_path / "unfinished").iterdir())
