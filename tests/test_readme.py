"""README.md against the code: its programs run, its commands parse, its reference is today's."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from nha_jax.configuration import to_mapping
from nha_jax.data.config import DataConfig
from nha_jax.models.config import NHAConfig
from nha_jax.training.checkpoint import CheckpointConfig, Checkpointer
from nha_jax.training.config import RunConfig, TrainConfig
from nha_jax.training.optimizer import OptimizerConfig
from nha_jax.training.step import TrainState
from scripts import configuration_reference

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def _commands() -> list[list[str]]:
    """Every command of the README's shell blocks, as words."""
    lines = "".join(_blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line]


def _save_run(model: NHAConfig, params: Any, workdir: Path) -> None:
    """Leaves what a run with such a model would leave."""
    config = RunConfig(
        model=model,
        data=DataConfig(),
        optimizer=OptimizerConfig(peak_learning_rate=1e-3),
        train=TrainConfig(steps=1),
    )
    zero = np.zeros((), np.int32)
    state = TrainState(zero, params, opt_state=(), skipped=zero, skipped_in_a_row=zero)
    with Checkpointer(workdir / "checkpoints", CheckpointConfig()) as checkpointer:
        checkpointer.save(
            1,
            state,
            data_iterator=None,
            run_config=to_mapping(config),
            metrics={"validation/bits_per_byte": 2.0},
            wait=True,
        )


def test_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for program in _blocks("python"):
        if "load_params" in program:
            _save_run(names["config"], names["variables"]["params"], tmp_path / "runs" / "demo")
        exec(compile(program, "README.md", "exec"), names)
    assert names["y"].shape == names["z"].shape == (2, 100, 256)
    assert names["out"].shape == (2, 100, 8, 32)
    assert names["next_logits"].shape == (1, 1, 259)
    saved = nn.unbox(names["variables"]["params"])
    assert jax.tree.all(jax.tree.map(np.array_equal, names["params"], saved))
    assert names["logits"].shape == (1, 20, 259)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^)make (\w+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "lint"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_paths_exist() -> None:
    paths = re.findall(
        r"`((?:nha_jax|experiments|configs|tests|pallas|scripts)(?:/[\w./]*)?)`", README
    )
    paths += re.findall(r"\]\((?!http)([\w./]+)\)", README)
    assert "configs/nha_340m.py" in paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_commands_take_the_flags_that_are_shown(tmp_path: Path) -> None:
    """Each program is loaded and parses its command line; it does not run."""
    parse = """
import runpy, sys
from experiments import command_line
from nha_jax.training.config import RunConfig
from absl import flags
def run(main, **named):
    flags.FLAGS(sys.argv)
    if "config" in flags.FLAGS:
        command_line.read_config(RunConfig)
command_line.run = run
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)
"""
    commands = [words[2:] for words in _commands() if words[:2] == ["python", "-m"]]
    assert len(commands) >= 5
    for module, *arguments in commands:
        program = parse.replace("sys.argv[0], run_name", f"{module!r}, run_name")
        run = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr


def test_configuration_reference_is_up_to_date() -> None:
    assert configuration_reference.write(README) == README, (
        "run `python -m scripts.configuration_reference`"
    )
