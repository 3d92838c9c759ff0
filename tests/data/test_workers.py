"""Worker processes: the same batches, exact resume through Orbax, and no harm to or from them."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags

from nha_jax.data import iterator as iterator_module
from nha_jax.data.errors import DataError
from nha_jax.data.iterator import Batch, BatchIterator, start_worker
from nha_jax.data.pipeline import TextData

OpenText = Callable[..., TextData]

_PARENT = """
import sys
from nha_jax.data.config import DataConfig
from nha_jax.data.pipeline import open_data

if __name__ == "__main__":
    config = DataConfig(
        sys.argv[1], sequence_length=32, batch_size=4, num_workers=2, prefetch=2,
        cache_dir=sys.argv[2],
    )
    iterator = open_data(config, vocab_size=259).train.iterator()
    next(iterator)
    print("ready", flush=True)
    for _ in sys.stdin:
        for _ in range(20):
            next(iterator)
        print("more", flush=True)
"""


@pytest.fixture
def unparsed_flags() -> Iterator[None]:
    """absl as in a program that does not parse its flags."""
    parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.unparse_flags()
    yield
    if parsed:
        flags.FLAGS.mark_as_parsed()


def _take(iterator: BatchIterator, count: int) -> list[Batch]:
    return list(itertools.islice(iterator, count))


@pytest.mark.usefixtures("unparsed_flags")
def test_two_workers_give_the_batches_of_none_and_resume_exactly(
    open_text: OpenText, corpus: Path, tmp_path: Path
) -> None:
    data = open_text(corpus)
    per_epoch = -(-data.train.num_rows_per_epoch // 4)
    expected = _take(data.train.iterator(), 2 * per_epoch + 3)
    found: list[Batch] = []
    # Saved and restored twice; the number of workers changes on the way, and the stops fall inside
    # the first epoch, then past its end.
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        for step, (workers, stop) in enumerate(
            [(2, per_epoch // 2), (0, per_epoch + 2), (2, len(expected))]
        ):
            iterator = open_text(corpus, num_workers=workers).train.iterator()
            if step:
                arguments = ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator))
                manager.restore(step - 1, args=arguments)
            found += _take(iterator, stop - len(found))
            arguments = ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator))
            manager.save(step, args=arguments)
            manager.wait_until_finished()
            iterator.close()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert type(ours[name]) is np.ndarray
            np.testing.assert_array_equal(ours[name], theirs[name])


def _children(pid: int) -> list[int]:
    """Worker processes of a process; multiprocessing's resource tracker is none."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"spawn_main" in command:
            found.append(int(status.parent.name))
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize("moment", ["while they start", "while they work"])
def test_workers_outlive_sigterm_and_die_with_their_parent(
    corpus: Path, tmp_path: Path, moment: str
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script), str(corpus), str(tmp_path / "cache")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        if moment == "while they work":
            assert parent.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while len(workers := _children(parent.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(workers) == 2
        # As when a scheduler signals the whole process group before the run has saved.
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGINT)
        if moment == "while they start":
            assert parent.stdout.readline() == "ready\n"
        parent.stdin.write("go on\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "more\n"
        parent.kill()
    deadline = time.monotonic() + 20
    while any(map(_is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_running, workers))


def _platform_in_worker(answers: "multiprocessing.Queue[str]") -> None:
    start_worker(0, 1)
    answers.put(jax.default_backend())


def test_workers_keep_off_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    # A platform that is not there stands for the accelerator: who asks for it fails.
    monkeypatch.setenv("JAX_PLATFORMS", "accelerator")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=_platform_in_worker, args=(answers,))
    worker.start()
    assert answers.get(timeout=60) == "cpu"
    worker.join()


def test_too_little_shared_memory_is_refused(
    open_text: OpenText, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10_000

    monkeypatch.setattr(iterator_module.shutil, "disk_usage", lambda folder: Usage)
    with pytest.raises(DataError, match=r"need 0 MiB of shared memory .* lower data\.prefetch"):
        next(open_text(corpus, num_workers=2, batch_size=8).train.iterator())
