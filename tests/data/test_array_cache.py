"""A cache entry is complete or absent, and tokenising happens once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nha_jax.data import token_store
from nha_jax.data.array_cache import cache_folder, cached_entry, load_array, save_array
from nha_jax.data.errors import DataError
from nha_jax.data.pipeline import TextData

OpenText = Callable[..., TextData]

_WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from nha_jax.data.array_cache import cached_entry, save_array

def write(folder):
    save_array(folder, "a", np.arange(3))
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
    return {"writer": "child"}

print(cached_entry(Path(sys.argv[1]), "entry", write)[1]["writer"], flush=True)
"""


def _write(folder: Path) -> dict[str, Any]:
    save_array(folder, "a", np.arange(3))
    return {"writer": "parent"}


def _child(folder: Path, seconds: float) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    return child


def test_an_entry_is_written_once_and_read_back(tmp_path: Path) -> None:
    folder, meta = cached_entry(tmp_path, "entry", _write)
    assert meta == {"writer": "parent"}
    np.testing.assert_array_equal(load_array(folder, "a"), [0, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        load_array(folder, "a")[0] = 5

    def never(folder: Path) -> dict[str, Any]:
        raise AssertionError(folder)

    assert cached_entry(tmp_path, "entry", never) == (folder, meta)


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path: Path) -> None:
    with _child(tmp_path, 60) as child:
        assert (tmp_path / ".entry.tmp" / "a.npy").exists()
        child.send_signal(signal.SIGKILL)
    # Another entry's writer clears it away, and the entry itself can be made.
    cached_entry(tmp_path, "other", _write)
    assert not (tmp_path / ".entry.tmp").exists()
    assert cached_entry(tmp_path, "entry", _write)[1] == {"writer": "parent"}


def test_a_second_process_waits_for_the_first_and_takes_its_entry(tmp_path: Path) -> None:
    with _child(tmp_path, 0.5) as child:
        # Its folder is not cleared away under it.
        cached_entry(tmp_path, "other", _write)
        assert (tmp_path / ".entry.tmp").exists()
        assert cached_entry(tmp_path, "entry", _write)[1] == {"writer": "child"}
        assert child.wait() == 0


def test_a_failed_writer_leaves_no_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        save_array(folder, "a", np.arange(3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_entry(tmp_path, "entry", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]


def test_a_full_disk_is_one_clear_sentence(tmp_path: Path) -> None:
    def full(folder: Path) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"\(No space left on device\); set data\.cache_dir"):
        cached_entry(tmp_path, "entry", full)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        cached_entry(tmp_path / "file", "entry", _write)


@pytest.mark.parametrize("damage", ["cut", "gone", "meta"])
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = cached_entry(tmp_path, "entry", _write)
    if damage == "cut":
        os.truncate(folder / "a.npy", 20)
    elif damage == "gone":
        (folder / "a.npy").unlink()
    else:
        (folder / "meta.json").write_text("[]")
    with caplog.at_level("WARNING"):
        cached_entry(tmp_path, "entry", _write)
    assert "is damaged and will be made again" in caplog.text
    np.testing.assert_array_equal(load_array(folder, "a"), [0, 1, 2])


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder(None) == Path("/somewhere/nha_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder(None) == Path("/home/someone/.cache/nha_jax")
    assert cache_folder("/given") == Path("/given")


def test_a_corpus_is_tokenized_once_and_again_when_a_file_changes(
    open_text: OpenText, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = token_store._StoreWriter.write

    def counting(self: Any, files: Any, *arguments: Any) -> dict[str, Any]:
        written.append(len(files))
        return write(self, files, *arguments)

    monkeypatch.setattr(token_store._StoreWriter, "write", counting)
    open_text(corpus)
    open_text(corpus, sequence_length=16, batch_size=2, seed=3, packing=False)
    # Not even when a file that is none of the corpus comes to lie beside it.
    (corpus / "notes.md").write_text("notes")
    assert open_text(corpus).report.read.ignored_files == 1
    assert written == [60]
    time.sleep(0.02)  # Longer than the resolution of modification times.
    (corpus / "000.txt").write_bytes((corpus / "000.txt").read_bytes()[::-1] or b"x")
    open_text(corpus)
    assert written == [60, 60]
