"""Which text is read, how it becomes tokens and rows, and how rows become batches."""

import dataclasses

FORMATS = ("txt", "jsonl", "parquet", "arrayrecord")
STDLIB = "stdlib"
TIKTOKEN_PREFIX = "tiktoken:"
_SPLIT_BY = ("auto", "file", "record")
_INVALID_UTF8 = ("skip", "replace", "error")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Everything that decides the batches. Validated at construction.

    Attributes:
        source: Where the text is: `"stdlib"` (the `.py` files of the running Python's standard
            library; `"./stdlib"` is a folder of that name), a file, a folder with all below it, a
            glob pattern, or a tuple of these.
        format: Format of every file, or None to go by suffix: `.txt`, `.jsonl`/`.ndjson`,
            `.parquet`, `.array_record`/`.arrayrecord`.
        text_field: Name of the JSON field or Parquet column that holds the text.
        tokenizer: `"bytes"`, the path of a Hugging Face `tokenizer.json`, or `"tiktoken:NAME"`.
        bos_token, eos_token, pad_token: Special tokens by name, where those found in the
            tokenizer's own files are not the wanted ones. Not for `"bytes"`.
        sequence_length: Tokens in a row (T).
        batch_size: Rows in a global batch, all processes together.
        packing: True puts several documents in a row, kept apart by segment ids; False pads.
        seed: Seed of the order of rows; epoch e is shuffled with `seed + e`. The split into train
            and validation and the packing do not depend on it.
        num_workers: Worker processes that assemble batches; 0 assembles in threads. The batches are
            the same for every number.
        prefetch: Batches held ready, per worker.
        validation_fraction: Share of the split's units (see `split_by`) that is kept for
            validation, at least one; 0 for no validation.
        validation_source: Text for validation of its own, in the forms of `source`; then
            `validation_fraction` is not used.
        split_by: What goes to train or validation as a whole: `"file"`, `"record"` (a line, table
            row or record), or `"auto"`: by file, and by record when there is only one file. A
            single text file is cut in two at a line end instead.
        deduplicate: Drop every document whose bytes are equal to those of an earlier one. What is
            in validation is kept out of train in any case.
        max_bad_records: Broken records that are skipped and counted; one more is an error.
        invalid_utf8: What is done with text that is not UTF-8, where the tokenizer needs text (the
            bytes tokenizer takes the bytes as they are): `"skip"` it as a bad record, `"replace"`
            the bad bytes by U+FFFD, or `"error"`.
        cache_dir: Folder for token and plan files, which worker processes map into memory. None:
            `$XDG_CACHE_HOME/nha_jax`, or `~/.cache/nha_jax`. It can be deleted at any time
            between runs.

    Raises:
        ValueError: A field has a value that is not valid.
    """

    source: str | tuple[str, ...] = STDLIB
    format: str | None = None
    text_field: str = "text"
    tokenizer: str = "bytes"
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    sequence_length: int = 1024
    batch_size: int = 8
    packing: bool = True
    seed: int = 0
    num_workers: int = 0
    prefetch: int = 4
    validation_fraction: float = 0.05
    validation_source: str | tuple[str, ...] | None = None
    split_by: str = "auto"
    deduplicate: bool = True
    max_bad_records: int = 10
    invalid_utf8: str = "skip"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", _paths("source", self.source))
        if self.validation_source is not None:
            paths = _paths("validation_source", self.validation_source)
            object.__setattr__(self, "validation_source", paths)
        _choice("format", self.format, (None, *FORMATS))
        _choice("split_by", self.split_by, _SPLIT_BY)
        _choice("invalid_utf8", self.invalid_utf8, _INVALID_UTF8)
        for name in ("text_field", "tokenizer"):
            _text(name, getattr(self, name))
        for name in ("bos_token", "eos_token", "pad_token", "cache_dir"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        for name in ("packing", "deduplicate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"data.{name} must be True or False, got {getattr(self, name)!r}.")
        _integer("sequence_length", self.sequence_length, 1, 2**31 - 1)
        _integer("batch_size", self.batch_size, 1, 2**31 - 1)
        _integer("seed", self.seed, 0, 2**32 - 1)
        # A mistyped number must not start a thousand processes.
        _integer("num_workers", self.num_workers, 0, 128)
        _integer("prefetch", self.prefetch, 1, 1024)
        _integer("max_bad_records", self.max_bad_records, 0, 2**63 - 1)
        fraction = self.validation_fraction
        is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
        if not is_number or not 0 <= fraction < 1:
            raise ValueError(f"data.validation_fraction must be in [0, 1), got {fraction!r}.")


def _paths(name: str, value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value
    items = tuple(value) if isinstance(value, (list, tuple)) else ()
    if items and all(isinstance(item, str) and item for item in items):
        return items
    raise ValueError(
        f"data.{name} must be 'stdlib', a file, a folder, a glob pattern or several of these, "
        f"got {value!r}."
    )


def _choice(name: str, value: object, valid: tuple[object, ...]) -> None:
    if value not in valid:
        raise ValueError(f"data.{name} must be one of {list(valid)}, got {value!r}.")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"data.{name} must be a non-empty string, got {value!r}.")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"data.{name} must be an integer in [{low}, {high}], got {value!r}.")
