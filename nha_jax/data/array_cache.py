"""Folders of arrays on disk, written once as a whole and then mapped into memory by every process.

An entry is a folder `NAME` of `.npy` files and a `meta.json`. It is written as `.NAME.tmp` and
renamed when every byte is on disk, so that an entry is there completely or not at all, however its
writer ends. A writer holds the lock `.NAME.lock`: other processes that want the entry wait for it,
and a `.tmp` folder whose lock is free is what a dead writer left, removed by the next writer.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nha_jax.data.errors import DataError

_logger = logging.getLogger(__name__)

_META = "meta.json"


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_dir`, or without one `$XDG_CACHE_HOME/nha_jax`, or else `~/.cache/nha_jax`.

    Raises:
        DataError: None is given and there is no home folder.
    """
    if cache_dir is not None:
        return Path(cache_dir).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nha_jax"
    except RuntimeError as error:
        raise DataError(
            "There is no home folder for the token cache; set data.cache_dir."
        ) from error


def cached_entry(
    cache_dir: Path, name: str, write: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Returns an entry, written first if it is not there.

    Args:
        cache_dir: Folder of all entries; made if missing.
        name: Name of the entry, which must stand for its contents.
        write: Writes files into the folder it is given and returns the entry's metadata, which
            must survive JSON.

    Returns:
        The entry's folder and its metadata.

    Raises:
        DataError: The folder cannot be written, or the disk is full.
    """
    folder = cache_dir / name
    meta = _read_meta(folder)
    if meta is not None:
        return folder, meta
    temporary = cache_dir / f".{name}.tmp"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir, name, wait=True):
            meta = _read_meta(folder)
            if meta is not None:  # Another process wrote it meanwhile.
                return folder, meta
            for path in (folder, temporary):
                if path.is_dir():
                    shutil.rmtree(path)
            _remove_abandoned(cache_dir)
            temporary.mkdir()
            try:
                meta = write(temporary)
                _write_meta(temporary, meta)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"The cache folder {str(cache_dir)!r} cannot be written ({reason}); set data.cache_dir "
            "to a folder with room."
        ) from error
    return folder, meta


def save_array(folder: Path, name: str, array: np.ndarray) -> None:
    """Writes one array of an entry, down to the disk."""
    with (folder / f"{name}.npy").open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


def load_array(folder: Path, name: str) -> np.ndarray:
    """Maps one array of an entry into memory, read-only.

    Raises:
        DataError: The file is gone or damaged.
    """
    path = folder / f"{name}.npy"
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"The cache file {str(path)!r} is missing or damaged ({error}); delete its folder and "
            "start again."
        ) from error
    return array


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """Metadata of a complete entry whose files have their sizes, else None."""
    try:
        record = json.loads((folder / _META).read_text(encoding="utf-8"))
        if all((folder / name).stat().st_size == size for name, size in record["sizes"].items()):
            return dict(record["meta"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if folder.is_dir():
        _logger.warning("the cache entry %s is damaged and will be made again", folder)
    return None


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    with (folder / _META).open("w", encoding="utf-8") as file:
        json.dump({"sizes": sizes, "meta": meta}, file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _lock(cache_dir: Path, name: str, *, wait: bool) -> Iterator[None]:
    """Holds the lock of an entry; it goes with the process, so a dead writer holds none.

    Raises:
        BlockingIOError: Another process holds it and `wait` is False.
    """
    with (cache_dir / f".{name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            _logger.info("waiting for another process that writes %s in %s", name, cache_dir)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_abandoned(cache_dir: Path) -> None:
    """Removes the unfinished folders of dead writers."""
    for folder in cache_dir.glob(".*.tmp"):
        name = folder.name.removeprefix(".").removesuffix(".tmp")
        with contextlib.suppress(BlockingIOError), _lock(cache_dir, name, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
