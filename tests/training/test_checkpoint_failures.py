"""Saves that fail: the error is clear, is not lost, and the last good step stays usable."""

import contextlib
import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import grain
import jax
import pytest

from nha_jax.training import checkpoint_folder
from nha_jax.training.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from nha_jax.training.checkpoint_format import committed_steps
from tests.training.checkpoint_states import (
    RUN_CONFIG,
    State,
    abstract,
    assert_same,
    names,
    new_iterator,
    new_state,
    save_steps,
)


def save(checkpointer: Checkpointer, step: int, state: State | None = None) -> None:
    checkpointer.save(
        step, state or new_state(step), data_iterator=new_iterator(), run_config=RUN_CONFIG
    )


def fail_with_full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """The operating system refuses to let any file of this process grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for_failure(checkpointer: Checkpointer) -> None:
    """Waits as a training loop does: by asking, step after step."""
    assert checkpointer._thread is not None
    checkpointer._thread.join()
    checkpointer.check_for_errors()


SURFACING: dict[str, Callable[[Checkpointer], object]] = {
    "check_for_errors": wait_for_failure,
    "wait": Checkpointer.wait,
    "next save": lambda checkpointer: save(checkpointer, 9),
    "restore": lambda checkpointer: checkpointer.restore(abstract(), data_iterator=None),
    "close": Checkpointer.close,
}


@pytest.mark.parametrize("surfacing", SURFACING)
def test_failure_in_the_background_surfaces_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surfacing: str
) -> None:
    save_steps(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep_last=1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "write_manifest", fail_with_full_disk)
        save(checkpointer, 2)
        with pytest.raises(
            CheckpointError,
            match=r"saving step 2 in .* failed, the last good step is 1: the disk is full",
        ):
            SURFACING[surfacing](checkpointer)
    # The half-written step is gone, the step before was not deleted for its sake.
    assert names(tmp_path / "unfinished") == []
    assert committed_steps(tmp_path) == [1]
    # With space again, the run goes on.
    checkpointer.check_for_errors()
    restored = checkpointer.restore(abstract(), data_iterator=new_iterator())
    assert restored is not None
    assert_same(restored.state, new_state(1))
    save(checkpointer, 2)
    checkpointer.close()
    assert committed_steps(tmp_path) == [2]


def test_arrays_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The failure is Orbax's own, in its own thread."""
    noise = jax.random.bits(jax.random.key(0), (200_000,))
    large = new_state(2).replace(params={"w": noise})  # type: ignore[attr-defined]
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        with files_limited_to(100_000):
            save(checkpointer, 1)
            save(checkpointer, 2, large)
            with pytest.raises(
                CheckpointError, match=r"step 2 .* last good step is 1: .*too large"
            ):
                checkpointer.wait()
        # The sentence is all that is said: no tracebacks of Orbax's threads.
        assert "Traceback" not in caplog.text
        assert "Traceback" not in capfd.readouterr().err
        save(checkpointer, 2, large)
        checkpointer.wait()
        wanted = jax.eval_shape(lambda: large)
        restored = checkpointer.restore(wanted, data_iterator=None)
    assert restored is not None
    assert_same(restored.state, large)


def test_first_save_that_fails_names_no_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_folder, "write_manifest", fail_with_full_disk)
    with Checkpointer(tmp_path, CheckpointConfig(asynchronous=False)) as checkpointer:
        with pytest.raises(CheckpointError, match="there is no earlier step"):
            save(checkpointer, 1)
        assert checkpointer.restore(abstract(), data_iterator=None) is None


def test_failure_before_the_background_is_reached(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait()
        (writer,) = (tmp_path / "unfinished").iterdir()
        shutil.rmtree(writer)
        writer.write_text("a file in the place of a folder")
        with pytest.raises(CheckpointError, match=r"saving step 2 .*, the last good step is 1: "):
            save(checkpointer, 2)
        save(checkpointer, 2)
    assert committed_steps(tmp_path) == [1, 2]


def test_data_position_that_cannot_be_read(tmp_path: Path) -> None:
    class Broken(grain.DatasetIterator[int]):
        def __next__(self) -> int:
            return 0

        def get_state(self) -> dict[str, object]:
            raise ValueError("the position is lost")

        def set_state(self, state: dict[str, object]) -> None:
            raise NotImplementedError

    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        with pytest.raises(CheckpointError, match=r"saving step 1 .*: the position is lost$"):
            checkpointer.save(1, new_state(1), data_iterator=Broken(), run_config=RUN_CONFIG)
        save(checkpointer, 1)
    assert committed_steps(tmp_path) == [1]


def test_failed_save_does_not_hide_the_error_on_its_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_folder, "write_manifest", fail_with_full_disk)

    def train() -> None:
        with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
            save(checkpointer, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "saving step 1 in" in caplog.text


def test_old_step_that_cannot_be_deleted_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with Checkpointer(tmp_path, CheckpointConfig(keep_last=1)) as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_folder.shutil, "rmtree", refuse)
            save(checkpointer, 2)
            checkpointer.wait()
    assert committed_steps(tmp_path) == [2]
    assert "cannot be deleted: [Errno 13] Permission denied" in caplog.text
