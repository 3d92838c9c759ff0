"""Runs of several processes, as a cluster would start and treat them.

NHA_KILLS=20 kills a process twenty times instead of three.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nha_jax.training.checkpoint_format import committed_steps
from tests.experiments.test_train import history

REPOSITORY = Path(__file__).parents[2]
STEPS = 40
SAVE_EVERY = 10
KILLS = int(os.environ.get("NHA_KILLS", "3"))

Job = list[subprocess.Popen[str]]
StartJob = Callable[..., Job]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartJob]:
    """Starts the processes of a run: start(workdir, processes, "--flag=value", ...)."""
    started: Job = []
    folder = tmp_path_factory.mktemp("distributed")
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
        "PYTHONUNBUFFERED": "1",
    }

    def run(
        workdir: Path,
        processes: int,
        *flags: str,
        only: int | None = None,
        config: str = "tests/experiments/tiny_run.py",
    ) -> Job:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "experiments.train", f"--workdir={workdir}"]
        command += [f"--config={config}", f"--config.data.source={corpus}"]
        command += [
            f"--config.train.steps={STEPS}",
            f"--config.checkpoint.every_steps={SAVE_EVERY}",
        ]
        command += ["--config.data.validation_fraction=0"]
        devices = dict(environment)
        if processes > 1:
            command += ["--initialization_timeout=120", "--heartbeat_timeout=20"]
            devices |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(processes),
            }
        else:  # as many devices in one process
            devices["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        command += flags
        job = [
            subprocess.Popen(
                [*command, *([] if processes == 1 else [f"--process_id={index}"])],
                cwd=REPOSITORY,
                env=devices,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in (range(processes) if only is None else [only])
        ]
        started.extend(job)
        return job

    yield run
    for process in started:
        process.kill()
        process.wait()
        # Those of a process that a test killed were never read to their end.
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def finish(job: Job, code: int = 0) -> tuple[list[str], list[str]]:
    """Waits for all processes to end with an exit code; what they printed, and their errors."""
    results = [process.communicate(timeout=300) for process in job]
    assert [process.returncode for process in job] == [code] * len(job), results
    return [out for out, _ in results], [errors for _, errors in results]


def wait_for_step(job: Job, step: int) -> None:
    assert job[0].stdout is not None
    for line in job[0].stdout:
        match = re.match(r"step +(\d+)/", line)
        if match and int(match[1]) >= step:
            return
    raise AssertionError(f"the run ended early: {[process.communicate() for process in job]}")


@pytest.fixture(scope="module")
def undisturbed(start: StartJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    printed, errors = finish(start(workdir, 2))
    assert "devices: 2 x cpu (data=2" in printed[0]
    # Process 0 alone reports.
    assert not re.search(r"^step ", printed[1], re.MULTILINE)
    assert "error" not in errors[1]
    return workdir


def test_two_processes_are_one_with_two_devices(
    start: StartJob, undisturbed: Path, tmp_path: Path
) -> None:
    # Two begin, one goes on, two finish; the steps are those of two all the way.
    finish(start(tmp_path, 2, "--config.train.steps=10"))
    printed, _ = finish(start(tmp_path, 1, "--config.train.steps=20"))
    assert f"Resuming {tmp_path} after step 10." in printed[0]
    printed, _ = finish(start(tmp_path, 2))
    assert f"Resuming {tmp_path} after step 20." in printed[0]
    assert history(tmp_path) == history(undisturbed)


def test_a_signal_to_one_process_saves_and_stops_all(
    start: StartJob, undisturbed: Path, tmp_path: Path
) -> None:
    job = start(tmp_path, 2)
    wait_for_step(job, 12)
    job[1].send_signal(signal.SIGTERM)
    printed, _ = finish(job, 75)
    step = committed_steps(tmp_path / "checkpoints")[-1]
    assert f"Stopped after step {step};" in printed[0]
    assert 12 <= step < STEPS
    finish(start(tmp_path, 2))
    assert history(tmp_path) == history(undisturbed)


def test_a_killed_process_ends_the_others_and_costs_no_committed_step(
    start: StartJob, tmp_path: Path
) -> None:
    # Long enough not to end before the last kill, however late that comes.
    steps_of_run = f"--config.train.steps={150 * KILLS}"
    undisturbed, workdir = tmp_path / "undisturbed", tmp_path / "killed"
    finish(start(undisturbed, 1, steps_of_run))
    moments = random.Random(11)
    committed = 0
    for kill in range(KILLS):
        job = start(workdir, 2, steps_of_run)
        target = committed + 1 + moments.randrange(SAVE_EVERY)
        wait_for_step(job, target)
        victim = kill % 2
        job[victim].kill()
        began = time.monotonic()
        _, errors = job[1 - victim].communicate(timeout=120)
        # The heartbeat's 20 seconds are the most that the other may take to notice.
        assert time.monotonic() - began < 40
        assert job[1 - victim].returncode != 0
        told = f"process {victim} of the run ended or cannot be reached"
        assert told in errors or "another task died" in errors, errors
        steps = committed_steps(workdir / "checkpoints")
        assert max(steps, default=0) >= target - 2 * SAVE_EVERY
        assert max(steps, default=0) >= committed
        committed = max(steps, default=0)
    finish(start(workdir, 2, steps_of_run))
    assert history(workdir) == history(undisturbed)


def test_a_process_that_never_arrives_is_named(start: StartJob, tmp_path: Path) -> None:
    job = start(tmp_path / "run", 2, "--initialization_timeout=3", only=0)
    _, errors = finish(job, 1)
    assert "process 0 of 2 waited 3 seconds" in errors[0]
    assert "but process 1 did not arrive" in errors[0]
    assert not (tmp_path / "run").exists()


def test_processes_with_different_configurations_are_refused(
    start: StartJob, tmp_path: Path
) -> None:
    # Process 1 of this job reads another seed from a config file of its own.
    other = tmp_path / "other.py"
    other.write_text(
        "from tests.experiments import tiny_run\n\n"
        "def get_config():\n"
        "    config = tiny_run.get_config()\n"
        "    import os, sys\n"
        "    config.train.seed = int('--process_id=1' in sys.argv)\n"
        "    return config\n"
    )
    _, errors = finish(start(tmp_path / "run", 2, config=str(other)), 1)
    for text in errors:
        assert "The processes of a run must have one configuration, but that of process 1" in text
    assert "config.train.seed" in errors[1]
    assert not (tmp_path / "run").exists()
