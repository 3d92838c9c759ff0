"""The set-up script: how it finds an interpreter, and how it survives what cuts it off."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAMP = Path(".venv/installed-requirements.txt")
INTERPRETER = os.path.realpath(sys.executable)


class Project:
    """A folder with the script and requirements that need no network.

    Attributes:
        root: The folder; its name has a space in it.
        programs: A folder that stands first on PATH.
    """

    def __init__(self, root: Path):
        self.root = root / "a project"
        self.programs = root / "programs"
        (self.root / "scripts").mkdir(parents=True)
        self.programs.mkdir()
        shutil.copy(ROOT / "scripts/bootstrap.sh", self.root / "scripts")
        self.require("# nothing")

    def require(self, requirements: str) -> None:
        (self.root / "requirements.txt").write_text(requirements + "\n")

    def add_program(self, name: str, script: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def start(self, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["sh", str(self.root / "scripts/bootstrap.sh")],
            cwd=self.programs,
            env={"PATH": f"{self.programs}:/usr/bin:/bin", "PIP_NO_INDEX": "1"} | environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def set_up(self, **environment: str) -> tuple[int, str]:
        process = self.start(**environment)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors

    def is_complete(self) -> bool:
        stamp = self.root / STAMP
        return stamp.is_file() and stamp.read_text() == (self.root / "requirements.txt").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_skips_interpreters_that_do_not_start_and_old_ones(project: Project) -> None:
    project.add_program("python3", "echo 'Python 3.11.7'; exit 1")
    project.add_program("python3.12", "echo 'shim: version 3.12 is not active' >&2; exit 127")
    project.add_program("python3.13", f'exec "{INTERPRETER}" "$@"')
    code, errors = project.set_up()
    assert code == 0, errors
    assert project.is_complete()
    assert (project.root / ".venv/bin/python").is_file()


def test_named_interpreter_that_does_not_fit_is_refused_in_one_line(project: Project) -> None:
    project.add_program("old", "exit 1")
    code, errors = project.set_up(NHA_PYTHON=str(project.programs / "old"))
    assert code == 1
    assert errors.count("\n") == 1
    assert "3.12" in errors
    assert not (project.root / ".venv").exists()


def test_interpreter_without_venv_is_named_in_one_line(project: Project) -> None:
    project.add_program(
        "lame",
        f'exec "{INTERPRETER}" -I -c "import sys; sys.modules[\'ensurepip\'] = None\n$3"',
    )
    code, errors = project.set_up(NHA_PYTHON=str(project.programs / "lame"))
    assert code == 1
    assert errors.count("\n") == 1
    assert "ensurepip" in errors


def test_second_run_does_nothing_and_a_failing_change_loses_nothing(project: Project) -> None:
    assert project.set_up(NHA_PYTHON=INTERPRETER)[0] == 0
    made = (project.root / STAMP).stat().st_mtime_ns
    assert project.set_up(NHA_PYTHON="/nowhere") == (0, "")
    assert (project.root / STAMP).stat().st_mtime_ns == made

    project.require("some-package==1.0")
    # Port 9 of this machine, which nothing listens on.
    code, errors = project.set_up(
        NHA_PYTHON=INTERPRETER, PIP_NO_INDEX="0", PIP_INDEX_URL="http://127.0.0.1:9/simple"
    )
    assert code == 1
    first, last = errors.splitlines()
    assert "installing" in first
    assert "no package index can be reached" in last

    project.require("# nothing")
    assert project.set_up(NHA_PYTHON="/nowhere") == (0, "")


def test_change_makes_the_environment_anew(project: Project) -> None:
    assert project.set_up(NHA_PYTHON=INTERPRETER)[0] == 0
    (project.root / ".venv/left-over").touch()
    project.require("# another nothing")
    assert project.set_up(NHA_PYTHON=INTERPRETER)[0] == 0
    assert project.is_complete()
    assert not (project.root / ".venv/left-over").exists()
    assert not (project.root / ".venv.previous").exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_set_up_is_recovered(project: Project, how: signal.Signals) -> None:
    process = project.start(NHA_PYTHON=INTERPRETER)
    _wait_for(lambda: (project.root / ".venv/bin").exists())
    os.killpg(process.pid, how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not project.is_complete()
    code, errors = project.set_up(NHA_PYTHON=INTERPRETER)
    assert code == 0, errors
    assert project.is_complete()


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.01)
