"""Checksums of a checkpoint step: a manifest with the size and SHA-256 of each of its files.

Orbax accepts a flipped byte in an array file and hands out wrong numbers, so every step carries a
`MANIFEST.json` of its own, written last. SHA-256 because the processors this runs on have
instructions for it (about 1 GB/s per core here, twice BLAKE2b), because it tells damaged, swapped
and edited files alike, and because `sha256sum` checks it without this library. CRC-32 is three
times faster, but hashing happens in the background of training, in chunks that release the GIL.

Functions here know folders and files; what is in a step and when it is written is `checkpoint`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST_NAME = "MANIFEST.json"
_CHUNK_BYTES = 1 << 20
_SYNCHRONISING_THREADS = 8


class DamagedError(Exception):
    """A folder is not what its manifest says; the message names the file, found and expected."""


def write_manifest(folder: Path) -> None:
    """Hashes every file below `folder`, forces them to the disk and writes the manifest last.

    The manifest appears whole or not at all: it is written beside its place, synchronised, and
    renamed. After return, a power failure loses nothing of the folder.

    Args:
        folder: a folder that nobody writes to any more.

    Raises:
        OSError: reading or writing failed (a full disk, say); no manifest is left behind.
    """
    paths = sorted(folder.rglob("*"))
    # Waiting for the disk is shared, hashing is left to one core: training has the others.
    with ThreadPoolExecutor(max_workers=_SYNCHRONISING_THREADS) as pool:
        for _ in pool.map(synchronise, paths):
            pass
    files = {}
    for path in paths:
        if path.is_file():
            digest, size = _hash_file(path)
            files[path.relative_to(folder).as_posix()] = {"size": size, "sha256": digest}
    # The manifest's own digest tells a damaged manifest from damaged files.
    text = json.dumps({"files": files, "sha256": _digest_of_listing(files)}, indent=1)
    temporary = folder / (MANIFEST_NAME + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(folder / MANIFEST_NAME)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    synchronise(folder)


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads a manifest: file name -> {"size": bytes, "sha256": hexadecimal digest}.

    Raises:
        DamagedError: there is no manifest, or it is not the one that was written.
    """
    path = folder / MANIFEST_NAME
    try:
        content = json.loads(path.read_bytes())
        files = content["files"]
        intact = content["sha256"] == _digest_of_listing(files)
    except FileNotFoundError:
        raise DamagedError(
            f"{MANIFEST_NAME} is missing, which is written last, once a step is complete"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{MANIFEST_NAME} is unreadable ({error})") from error
    if not intact:
        raise DamagedError(f"{MANIFEST_NAME} does not match its own checksum")
    return files


def verify_files(folder: Path, manifest: Mapping[str, Mapping[str, Any]]) -> None:
    """Compares files with their manifest: all sizes first, then all contents.

    Args:
        folder: the folder that the manifest belongs to.
        manifest: what `read_manifest` returned, or the part of it to verify.

    Raises:
        DamagedError: a file is missing, has another size or another content.
    """
    for name, entry in manifest.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedError(f"{name} is missing") from error
        if size != entry["size"]:
            raise DamagedError(f"{name} has {size} bytes where {entry['size']} were written")

    def verify(name: str) -> None:
        try:
            digest, _ = _hash_file(folder / name)
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error})") from error
        if digest != manifest[name]["sha256"]:
            raise DamagedError(
                f"{name} has the SHA-256 {digest[:12]}... where "
                f"{manifest[name]['sha256'][:12]}... was written"
            )

    # Nothing trains while a checkpoint is verified, so every core may hash.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for _ in pool.map(verify, manifest):
            pass


def synchronise(path: Path) -> None:
    """Forces a file's content, or a folder's entries (creations and renames), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_file(path: Path) -> tuple[str, int]:
    """Returns a file's SHA-256 and size."""
    hasher = hashlib.sha256()
    size = 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return hasher.hexdigest(), size


def _digest_of_listing(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
