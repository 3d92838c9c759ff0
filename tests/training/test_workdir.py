"""The folder of a run: refused before anything is built where it cannot be used, and held alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nha_jax.training.workdir import WorkdirError, check_workdir, hold_workdir, write_errors

_HOLDER = """
import sys
from pathlib import Path
from nha_jax.training.workdir import hold_workdir
with hold_workdir(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_is_new_or_has_a_run_is_fine(tmp_path: Path) -> None:
    check_workdir(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    check_workdir(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_file_in_the_place_of_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(WorkdirError, match=f"{name} must be a folder of the run, but is a file"):
        check_workdir(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "loss.png", "lock"])
def test_a_folder_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(WorkdirError, match=f"{name} must be a file of the run, but is a folder"):
        check_workdir(tmp_path)


def test_a_workdir_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match="file must be a folder of the run, but is a file"):
        check_workdir(tmp_path / "file")
    with pytest.raises(WorkdirError, match=re.escape(f"{tmp_path / 'file'} is no folder")):
        check_workdir(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_workdir_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WorkdirError, match="no permission to write"):
        check_workdir(tmp_path / "run")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        owner = f"in use by process {holder.pid} on "
        with pytest.raises(WorkdirError, match=owner), hold_workdir(tmp_path / "run"):
            pass
        # However it ends, the folder is free again.
        holder.kill()
    with hold_workdir(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / "lock").read_text()


def test_errors_of_the_system_are_one_sentence(tmp_path: Path) -> None:
    message = f"{tmp_path} cannot be written: Is a directory."
    with pytest.raises(WorkdirError, match=re.escape(message)), write_errors(tmp_path):
        tmp_path.write_text("")
