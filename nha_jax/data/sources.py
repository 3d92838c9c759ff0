"""Finds the files of a corpus and reads documents out of them, one at a time and in a fixed order.

A document is bytes: a whole text file, the named field of a JSON line, the named column of a
Parquet row, or an ArrayRecord record.
"""

import dataclasses
import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nha_jax.data.config import STDLIB
from nha_jax.data.errors import DataError

_SUFFIXES = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".array_record": "arrayrecord",
    ".arrayrecord": "arrayrecord",
}
# Parts of the standard library that are not its sources: installed packages and test suites.
_STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
_RECORDS_PER_READ = 1024


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of the corpus.

    Attributes:
        path: Where it is.
        format: One of `nha_jax.data.config.FORMATS`.
        optional: True where a file that cannot be read is skipped and counted (the standard
            library's), False where it is an error (the user's).
    """

    path: str
    format: str
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Document:
    """The bytes of one document and where they came from, for messages."""

    data: bytes
    location: str


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read: where, and one clause that says why."""

    location: str
    reason: str


class UnreadableFileError(DataError):
    """A file cannot be opened or read."""


def find_files(
    source: str | tuple[str, ...], file_format: str | None, field: str = "data.source"
) -> tuple[list[SourceFile], int]:
    """Lists the files of a corpus: the sources in the order given, each one's files sorted by path.

    Args:
        source: `"stdlib"`, a file, a folder (searched recursively, without hidden files), a glob
            pattern (`**` for folders), or a tuple of these. A file found twice counts once.
        file_format: Format of every file, or None to go by suffix.
        field: Name of the configuration field, for messages.

    Returns:
        The files, and how many were left out: of folders those of no known format, and repeats.

    Raises:
        DataError: A path or pattern matches nothing, or a file's format cannot be told.
    """
    specs = (source,) if isinstance(source, str) else source
    files: dict[str, SourceFile] = {}
    ignored = 0
    for spec in specs:
        path = Path(spec).expanduser()
        if spec == STDLIB:
            found = [SourceFile(name, "txt", optional=True) for name in _stdlib_files()]
        elif path.is_dir():
            names = _walk(path, hidden=False)
            found = [
                SourceFile(name, _SUFFIXES[suffix])
                for name in names
                if (suffix := _suffix(name)) in _SUFFIXES
                and file_format in (None, _SUFFIXES[suffix])
            ]
            ignored += len(names) - len(found)
            if not found:
                valid = sorted(s for s, f in _SUFFIXES.items() if file_format in (None, f))
                raise DataError(
                    f"{field}: the folder {spec!r} has no file that ends in {' or '.join(valid)} "
                    f"among its {len(names)} files."
                )
        elif path.exists():
            found = [SourceFile(str(path), _format_of(str(path), file_format, field))]
        elif glob.has_magic(spec):
            # Path.glob takes no absolute patterns.
            matches = glob.glob(str(path), recursive=True)  # noqa: PTH207
            names = sorted(name for name in matches if Path(name).is_file())
            if not names:
                raise DataError(f"{field}: the pattern {spec!r} matches no file.")
            found = [SourceFile(name, _format_of(name, file_format, field)) for name in names]
        else:
            raise DataError(f"{field}: there is no file or folder {spec!r}.")
        for file in found:
            key = os.path.realpath(file.path)
            ignored += key in files
            files.setdefault(key, file)
    return list(files.values()), ignored


def read_documents(file: SourceFile, text_field: str) -> Iterator[Document | BadRecord]:
    """Reads one file.

    Args:
        file: The file.
        text_field: Field of a JSON line, or column of a Parquet file, that holds the text.

    Yields:
        Documents, empty ones included, and in their place in the order records that are broken.

    Raises:
        UnreadableFileError: The file cannot be opened or is damaged.
        DataError: A Parquet file has no such column, or it holds no text.
    """
    readers = {
        "txt": _read_text,
        "jsonl": _read_json_lines,
        "parquet": _read_parquet,
        "arrayrecord": _read_array_record,
    }
    try:
        yield from readers[file.format](file.path, text_field)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnreadableFileError(f"The file {file.path!r} cannot be read: {reason}.") from error


def _stdlib_files() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name in _walk(root, hidden=True) if name.endswith(".py")]
    if not names:
        raise DataError(
            f"data.source: this Python has no .py files of its standard library in {str(root)!r}; "
            "give text of your own."
        )
    return names


def _walk(root: Path, *, hidden: bool) -> list[str]:
    """All files below `root`, sorted; `hidden` False leaves out what begins with a dot."""
    names = []
    for folder, subfolders, files in os.walk(root):
        if hidden:
            subfolders[:] = [name for name in subfolders if name not in _STDLIB_EXCLUDED]
        else:
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            files = [name for name in files if not name.startswith(".")]
        names += [str(Path(folder, name)) for name in files]
    return sorted(names)


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


def _format_of(path: str, file_format: str | None, field: str) -> str:
    if file_format is not None:
        return file_format
    try:
        return _SUFFIXES[_suffix(path)]
    except KeyError:
        raise DataError(
            f"{field}: the format of {path!r} cannot be told from its name; the suffix must be one "
            f"of {sorted(_SUFFIXES)}, or data.format must be set."
        ) from None


def _read_text(path: str, text_field: str) -> Iterator[Document | BadRecord]:
    del text_field  # A text file has no fields.
    yield Document(Path(path).read_bytes(), path)


def _read_json_lines(path: str, text_field: str) -> Iterator[Document | BadRecord]:
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                # Decoded here because json.loads guesses at UTF-16 and UTF-32 when given bytes.
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield BadRecord(location, f"the line is not UTF-8 (byte {error.start})")
                continue
            except (ValueError, RecursionError) as error:
                yield BadRecord(location, f"the line is not JSON ({error})")
                continue
            yield _json_document(record, text_field, location)


def _json_document(record: Any, text_field: str, location: str) -> Document | BadRecord:
    if not isinstance(record, dict):
        kind = type(record).__name__
        return BadRecord(location, f"the line is a JSON {kind}, where an object must be")
    if text_field not in record:
        names = ", ".join(map(repr, sorted(record)[:8])) or "none"
        return BadRecord(location, f"there is no field {text_field!r}; the fields are {names}")
    text = record[text_field]
    if not isinstance(text, str):
        kind = type(text).__name__
        return BadRecord(location, f"the field {text_field!r} is a {kind}, where text must be")
    try:
        return Document(text.encode("utf-8"), location)
    except UnicodeEncodeError:
        return BadRecord(location, f"the field {text_field!r} holds half a surrogate pair")


def _read_parquet(path: str, text_field: str) -> Iterator[Document | BadRecord]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"Reading {path!r} needs pyarrow, which is not installed: `pip install pyarrow`."
        ) from error
    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise DataError(
                    f"{path!r} has no column {text_field!r} (data.text_field); its columns are "
                    f"{names}."
                )
            kind = table.schema_arrow.field(text_field).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            as_text = (
                pa.types.is_string,
                pa.types.is_large_string,
                pa.types.is_string_view,
                pa.types.is_binary,
                pa.types.is_large_binary,
                pa.types.is_binary_view,
            )
            if not any(is_kind(kind) for is_kind in as_text):
                raise DataError(
                    f"The column {text_field!r} of {path!r} is {kind}, where text must be."
                )
            row = 0
            batches = table.iter_batches(batch_size=_RECORDS_PER_READ, columns=[text_field])
            for batch in batches:
                # As bytes: Parquet does not promise that a string column is UTF-8.
                column = batch.column(0).cast(kind).cast(pa.large_binary())
                for value in column.to_pylist():
                    location = f"{path}: row {row}"
                    row += 1
                    if value is None:
                        yield BadRecord(location, f"the column {text_field!r} is null")
                    else:
                        yield Document(value, location)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UnreadableFileError(f"The file {path!r} is not Parquet ({reason}).") from error


def _read_array_record(path: str, text_field: str) -> Iterator[Document | BadRecord]:
    del text_field  # A record is the text itself.
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise DataError(
            f"Reading {path!r} needs array_record, which is not installed: "
            "`pip install array_record`."
        ) from error
    # The reader's own message for a file that cannot be opened does not say why.
    Path(path).open("rb").close()
    try:
        reader = array_record_module.ArrayRecordReader(path)
        count = reader.num_records()
        for start in range(0, count, _RECORDS_PER_READ):
            indices = range(start, min(start + _RECORDS_PER_READ, count))
            for index, record in zip(indices, reader.read(list(indices)), strict=True):
                yield Document(record, f"{path}: record {index}")
        # A cut file opens with no records and no exception.
        if not reader.ok():
            raise UnreadableFileError(f"The file {path!r} is a damaged or cut ArrayRecord file.")
        reader.close()
    except UnreadableFileError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise UnreadableFileError(f"The file {path!r} is not ArrayRecord ({reason}).") from error
