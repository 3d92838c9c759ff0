"""A corpus as token ids: every document tokenised once, in the order of its files, kept on disk."""

import array
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nha_jax.data import array_cache, sources
from nha_jax.data.config import DataConfig
from nha_jax.data.errors import DataError
from nha_jax.data.tokenizers import Tokenizer

_logger = logging.getLogger(__name__)

# Part of every entry's name: raised when what is written for the same input changes.
_VERSION = 1
_BATCH_DOCUMENTS = 512
_BATCH_BYTES = 4 << 20
_KEPT_MESSAGES = 10
_DTYPES = ("uint16", "uint32")


@dataclasses.dataclass(frozen=True)
class ReadCounts:
    """What was met while a corpus was read.

    Attributes:
        files: Files read.
        ignored_files: Files of a folder that have no known format, and files listed twice.
        unreadable_files: Files of the standard library that could not be read.
        bad_records: Records skipped because they are broken.
        bad_record_messages: The first ten of them: where and why.
        empty_documents: Documents without a byte, skipped.
        replaced_utf8: Documents in which bytes that are not UTF-8 were replaced.
    """

    files: int
    ignored_files: int
    unreadable_files: int
    bad_records: int
    bad_record_messages: tuple[str, ...]
    empty_documents: int
    replaced_utf8: int


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """The tokens of a corpus, mapped into memory. Document d is [BOS] + text + [EOS].

    Attributes:
        folder: Where the arrays are.
        start: int64 [D + 1]; document d is `tokens[start[d]:start[d + 1]]`.
        content_hash: uint64 [D]; hash of the document's bytes.
        num_bytes: int64 [D]; bytes of the document's text.
        file: int32 [D]; number of the document's file.
        counts: What was met while reading.
        digest: Hash of all tokens and boundaries.
        cut: Whether the two documents are the two parts of a single text file.
    """

    folder: Path
    start: np.ndarray
    content_hash: np.ndarray
    num_bytes: np.ndarray
    file: np.ndarray
    counts: ReadCounts
    digest: str
    cut: bool


def tokenize_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    source: str | tuple[str, ...],
    field: str,
    cut_fraction: float,
    cache_dir: Path,
) -> TokenStore:
    """Reads and tokenises a corpus, or finds it done.

    What is cached is known by the path, size and modification time of every file, by the tokenizer,
    and by the fields of `config` that decide which documents are read.

    Args:
        config: How to read.
        tokenizer: The tokenizer.
        source: The corpus, in the forms of `DataConfig.source`.
        field: Name of the configuration field of `source`, for messages.
        cut_fraction: A corpus of a single text file is cut in two documents, the last one with
            this share of its bytes; 0 leaves it whole.
        cache_dir: Folder of cache entries.

    Returns:
        The tokens.

    Raises:
        DataError: A file is missing or unreadable, there are more bad records than
            `config.max_bad_records`, there is no text at all, or the disk is full.
    """
    files, ignored = sources.find_files(source, config.format, field)
    cut_fraction = cut_fraction if len(files) == 1 and files[0].format == "txt" else 0.0
    key = json.dumps(
        [
            _VERSION,
            tokenizer.fingerprint,
            config.text_field,
            config.invalid_utf8,
            cut_fraction,
            [_identity(file) for file in files],
        ]
    )
    name = "tokens-" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]

    def write(folder: Path) -> dict[str, Any]:
        _logger.info("tokenizing %d files of %s into %s", len(files), field, cache_dir)
        writer = _StoreWriter(folder, config, tokenizer)
        return writer.write(files, cut_fraction, field)

    folder, meta = array_cache.cached_entry(cache_dir, name, write)
    meta["counts"]["bad_record_messages"] = tuple(meta["counts"]["bad_record_messages"])
    # Not cached: other files may come and go beside those of the corpus.
    counts = ReadCounts(**meta["counts"], ignored_files=ignored)
    if counts.bad_records > config.max_bad_records:
        # The first one too many, as without the cache, if it is among those kept.
        kept = counts.bad_record_messages
        message = kept[min(config.max_bad_records, len(kept) - 1)]
        raise DataError(_too_many_bad(message, config.max_bad_records))
    return TokenStore(
        folder=folder,
        start=array_cache.load_array(folder, "start"),
        content_hash=array_cache.load_array(folder, "content_hash"),
        num_bytes=array_cache.load_array(folder, "num_bytes"),
        file=array_cache.load_array(folder, "file"),
        counts=counts,
        digest=meta["digest"],
        cut=cut_fraction > 0,
    )


def load_tokens(folder: Path) -> np.ndarray:
    """Token ids of a store, mapped into memory: uint16 or uint32 [number of tokens].

    Raises:
        DataError: The file is gone.
    """
    for dtype in _DTYPES:
        path = folder / f"tokens.{dtype}"
        if path.exists():
            return np.memmap(path, dtype, mode="r")
    raise DataError(f"The cache entry {str(folder)!r} has no tokens; delete it and start again.")


class _StoreWriter:
    """Tokenises documents in batches and appends them to the arrays of one entry."""

    def __init__(self, folder: Path, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._config = config
        self._tokenizer = tokenizer
        self._dtype = _DTYPES[0] if tokenizer.vocab_size <= 2**16 else _DTYPES[1]
        self._digest = hashlib.sha256()
        # Compact: 8 bytes a document, however many there are.
        self._start = array.array("q", [0])
        self._content_hash = array.array("Q")
        self._num_bytes = array.array("q")
        self._file = array.array("i")
        self._bad_records = 0
        self._messages: list[str] = []
        self._unreadable = 0
        self._empty = 0
        self._replaced = 0

    def write(
        self, files: list[sources.SourceFile], cut_fraction: float, field: str
    ) -> dict[str, Any]:
        """Writes the entry; returns the fields of its `ReadCounts` and its `digest`."""
        # Raw, because an .npy file says its length at the beginning.
        with (self._folder / f"tokens.{self._dtype}").open("wb") as raw:
            batch: list[tuple[int, sources.Document]] = []
            size = 0
            for item in self._documents(files, cut_fraction):
                batch.append(item)
                size += len(item[1].data)
                if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
                    self._append(raw, batch)
                    batch, size = [], 0
            self._append(raw, batch)
            raw.flush()
            os.fsync(raw.fileno())
        if not self._num_bytes:
            raise DataError(self._nothing(field, len(files)))
        start = np.frombuffer(self._start, np.int64)
        array_cache.save_array(self._folder, "start", start)
        hashes = np.frombuffer(self._content_hash, np.uint64)
        array_cache.save_array(self._folder, "content_hash", hashes)
        num_bytes = np.frombuffer(self._num_bytes, np.int64)
        array_cache.save_array(self._folder, "num_bytes", num_bytes)
        array_cache.save_array(self._folder, "file", np.frombuffer(self._file, np.int32))
        self._digest.update(start.tobytes())
        counts = {
            "files": len(files) - self._unreadable,
            "unreadable_files": self._unreadable,
            "bad_records": self._bad_records,
            "bad_record_messages": self._messages,
            "empty_documents": self._empty,
            "replaced_utf8": self._replaced,
        }
        return {"counts": counts, "digest": self._digest.hexdigest()}

    def _documents(
        self, files: list[sources.SourceFile], cut_fraction: float
    ) -> Iterator[tuple[int, sources.Document]]:
        """Numbers of files and their usable documents; the others are counted."""
        for number, file in enumerate(files):
            try:
                for record in sources.read_documents(file, self._config.text_field):
                    document = self._checked(record)
                    if document is None:
                        continue
                    for part in _cut(document, cut_fraction):
                        yield number, part
            except sources.UnreadableFileError:
                if not file.optional:
                    raise
                self._unreadable += 1

    def _checked(self, record: sources.Document | sources.BadRecord) -> sources.Document | None:
        """The document as it is to be tokenised, or None where there is none."""
        if isinstance(record, sources.BadRecord):
            self._count_bad(record)
            return None
        if not record.data:
            self._empty += 1
            return None
        if self._tokenizer.takes_bytes:
            return record
        try:
            record.data.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"the text is not UTF-8 (byte {error.start})"
            if self._config.invalid_utf8 == "error":
                raise DataError(
                    f"{record.location}: {reason}; set data.invalid_utf8 to 'skip' or 'replace' to "
                    "go on."
                ) from error
            if self._config.invalid_utf8 == "skip":
                self._count_bad(sources.BadRecord(record.location, reason))
                return None
            self._replaced += 1
            text = record.data.decode("utf-8", errors="replace")
            return sources.Document(text.encode("utf-8"), record.location)
        return record

    def _count_bad(self, record: sources.BadRecord) -> None:
        self._bad_records += 1
        message = f"{record.location}: {record.reason}"
        if len(self._messages) < _KEPT_MESSAGES:
            self._messages.append(message)
            _logger.warning("skipped a bad record: %s", message)
        if self._bad_records > self._config.max_bad_records:
            raise DataError(_too_many_bad(message, self._config.max_bad_records))

    def _append(self, raw: BinaryIO, batch: list[tuple[int, sources.Document]]) -> None:
        tokenizer = self._tokenizer
        encoded = tokenizer.encode_batch([document.data for _, document in batch])
        for (number, document), ids in zip(batch, encoded, strict=True):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
                raise DataError(
                    f"{document.location}: the tokenizer gave the ids {ids.min()} to {ids.max()}, "
                    f"outside its vocabulary [0, {tokenizer.vocab_size})."
                )
            tokens = np.empty(ids.size + 2, self._dtype)
            tokens[0] = tokenizer.bos_id
            tokens[1:-1] = ids
            tokens[-1] = tokenizer.eos_id
            data = tokens.tobytes()
            raw.write(data)
            self._digest.update(data)
            self._start.append(self._start[-1] + tokens.size)
            hashed = hashlib.blake2b(document.data, digest_size=8).digest()
            self._content_hash.append(int.from_bytes(hashed, "little"))
            self._num_bytes.append(len(document.data))
            self._file.append(number)

    def _nothing(self, field: str, files: int) -> str:
        detail = f"; the first bad record is {self._messages[0]}" if self._messages else ""
        return (
            f"{field}: the corpus is empty: {files} files with {self._empty} empty documents and "
            f"{self._bad_records} bad records{detail}."
        )


def _identity(file: sources.SourceFile) -> list[Any]:
    try:
        status = Path(file.path).stat()
    except OSError:
        return [file.path, file.format, file.optional, None, None]
    path = str(Path(file.path).absolute())
    return [path, file.format, file.optional, status.st_size, status.st_mtime_ns]


def _cut(document: sources.Document, fraction: float) -> list[sources.Document]:
    """Cuts off the last `fraction` of a text, at a line end where one is near."""
    if fraction == 0.0:
        return [document]
    data = document.data
    target = min(max(1, round(len(data) * (1 - fraction))), len(data) - 1)
    nearest = max(0, round(len(data) * (1 - 2 * fraction)))
    position = data.rfind(b"\n", nearest, target) + 1
    if position == 0:
        position = target
        while position > 0 and data[position] & 0xC0 == 0x80:  # Inside a UTF-8 character.
            position -= 1
    if position == 0:
        return [document]
    return [
        sources.Document(data[:position], document.location),
        sources.Document(data[position:], document.location),
    ]


def _too_many_bad(message: str, limit: int) -> str:
    return f"{message}; that is more than data.max_bad_records={limit} bad records."
