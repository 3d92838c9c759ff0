"""From a `DataConfig` to batches: tokenise once, plan all rows, then read rows by index with Grain.

Batch b of training is rows bB to (b + 1)B - 1 of an endless stream: all rows, shuffled anew in
every epoch, one epoch after another. A process takes its contiguous part of the batch. Nothing else
enters, so that batches depend neither on the number of processes nor on that of workers.
"""

import dataclasses
import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np

from nha_jax.data import array_cache
from nha_jax.data.config import DataConfig
from nha_jax.data.errors import DataError
from nha_jax.data.iterator import (
    BatchIterator,
    check_shared_memory,
    mark_flags_parsed,
    start_worker,
)
from nha_jax.data.packing import RowPlan, build_row, plan_rows
from nha_jax.data.report import DataReport, SplitReport
from nha_jax.data.split import split_documents
from nha_jax.data.token_store import TokenStore, load_tokens, tokenize_corpus
from nha_jax.data.tokenizers import Tokenizer, load_tokenizer

# Part of every plan's name: raised when the split or the packing of the same input changes.
_VERSION = 1


class TextSplit:
    """One side of the split, ready to be read.

    Attributes:
        num_rows_per_epoch: Rows of an epoch (R).
        num_batches_per_epoch: Batches of a validation pass; for training, whole batches in an
            epoch (the next epoch begins within a batch where this leaves a remainder).
        fingerprint: What decides the batches; equal for every process, and compared when the
            state of an iterator is restored.
    """

    def __init__(
        self,
        rows: "_Rows",
        config: DataConfig,
        *,
        endless: bool,
        fingerprint: dict[str, Any],
        process_index: int,
        process_count: int,
    ) -> None:
        self.num_rows_per_epoch = len(rows)
        self.fingerprint = fingerprint
        self._rows = rows
        self._config = config
        self._endless = endless
        # A validation pass is short beside the start of a worker process.
        self._num_workers = config.num_workers if endless else 0
        self._process_index = process_index
        self._process_count = process_count
        whole, rest = divmod(len(rows), config.batch_size)
        self.num_batches_per_epoch = whole + (not endless and rest > 0)

    def iterator(self) -> BatchIterator:
        """A new iterator, at the first batch.

        It yields dicts of int32 [batch_size / process_count, T] NumPy arrays: `tokens`, `targets`,
        `segment_ids`, `positions` and `loss_mask`. That of training never ends; that of validation
        yields every row once and fills the last batch up with rows of segment 0. Its state is the
        number of batches taken and can be saved with `grain.checkpoint.CheckpointSave`; it is the
        same for every number of workers and processes.
        """
        has_workers = self._num_workers > 0
        return BatchIterator(self._batches_from, self.fingerprint, has_workers=has_workers)

    def _batches_from(self, first_batch: int) -> grain.DatasetIterator:
        """Grain's iterator over the batches of this process from `first_batch` on."""
        config = self._config
        rows: grain.MapDataset = grain.MapDataset.source(self._rows)
        if self._endless:
            rows = rows.shuffle(seed=config.seed).repeat()
        part: grain.MapDataset = _ProcessRows(
            rows,
            empty_row=self._rows.empty_row,
            batch_size=config.batch_size,
            process_index=self._process_index,
            process_count=self._process_count,
            first_batch=first_batch,
        )
        batches = part.batch(config.batch_size // self._process_count, drop_remainder=True)
        dataset = batches.to_iter_dataset(
            grain.ReadOptions(num_threads=2, prefetch_buffer_size=config.prefetch)
        )
        if self._num_workers:
            mark_flags_parsed()
            # Of each worker: its buffer, and a batch on either end.
            batch_bytes = sum(array.nbytes for array in self._rows.empty_row.values())
            batch_bytes *= config.batch_size // self._process_count
            check_shared_memory(self._num_workers * (config.prefetch + 2) * batch_bytes)
            dataset = dataset.mp_prefetch(
                grain.multiprocessing.MultiprocessingOptions(
                    num_workers=self._num_workers, per_worker_buffer_size=config.prefetch
                ),
                worker_init_fn=start_worker,
            )
        return iter(dataset)


@dataclasses.dataclass(frozen=True)
class TextData:
    """An opened corpus.

    Attributes:
        tokenizer: The tokenizer.
        train: The training side; its iterator repeats epochs for ever.
        validation: The validation side, one pass; None with `validation_fraction=0` and no
            `validation_source`.
        report: What was read and what was dropped; `str(report)` is for people.
    """

    tokenizer: Tokenizer
    train: TextSplit
    validation: TextSplit | None
    report: DataReport


def open_data(
    config: DataConfig, *, vocab_size: int, process_index: int = 0, process_count: int = 1
) -> TextData:
    """Reads, tokenises, splits and packs a corpus, or finds that done in the cache.

    Args:
        config: What to read and how.
        vocab_size: Vocabulary of the model.
        process_index: Number of this process.
        process_count: Number of processes; it must divide `config.batch_size`.

    Returns:
        Tokenizer, both sides of the split and the report.

    Raises:
        DataError: A file is missing or broken, the corpus is empty or too small for a row or a
            batch, the tokenizer's ids do not fit the vocabulary, or the batch cannot be shared out.
    """
    if process_count < 1 or not 0 <= process_index < process_count:
        raise DataError(
            f"process_index must be in [0, process_count), got process_index={process_index} and "
            f"process_count={process_count}."
        )
    if config.batch_size % process_count:
        raise DataError(
            f"data.batch_size={config.batch_size} must be a multiple of the number of processes, "
            f"{process_count}."
        )
    tokenizer = load_tokenizer(
        config.tokenizer,
        bos_token=config.bos_token,
        eos_token=config.eos_token,
        pad_token=config.pad_token,
    )
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"The tokenizer {config.tokenizer!r} has token ids up to {tokenizer.vocab_size - 1}, "
            f"outside the model's vocabulary [0, {vocab_size}); vocab_size must be at least "
            f"{tokenizer.vocab_size}."
        )
    cache_dir = array_cache.cache_folder(config.cache_dir)
    tokenize = functools.partial(tokenize_corpus, config, tokenizer, cache_dir=cache_dir)
    has_source = config.validation_source is not None
    store = tokenize(
        source=config.source,
        field="data.source",
        cut_fraction=0.0 if has_source else config.validation_fraction,
    )
    validation_store = None
    if config.validation_source is not None:
        validation_store = tokenize(
            source=config.validation_source, field="data.validation_source", cut_fraction=0.0
        )
    folder, report, digest = _plan(config, cache_dir, store, validation_store)
    _check_sizes(config, report)
    fingerprint = {
        "corpus": digest,
        "tokenizer": tokenizer.fingerprint,
        "sequence_length": config.sequence_length,
        "batch_size": config.batch_size,
        "packing": config.packing,
        "seed": config.seed,
    }

    def side(name: str, tokens_of: TokenStore, rows: int) -> TextSplit:
        return TextSplit(
            _Rows(tokens_of.folder, folder, name, rows, config.sequence_length, tokenizer.pad_id),
            config,
            endless=name == "train",
            fingerprint={"split": name, **fingerprint},
            process_index=process_index,
            process_count=process_count,
        )

    train = side("train", store, report.train.rows)
    validation = None
    if report.validation is not None:
        validation = side("validation", validation_store or store, report.validation.rows)
    return TextData(tokenizer, train, validation, report)


class _Rows:
    """Random access to the rows of one side; pickled as paths, so that workers map the files."""

    def __init__(
        self,
        tokens_folder: Path,
        plan_folder: Path,
        side: str,
        num_rows: int,
        sequence_length: int,
        pad_id: int,
    ) -> None:
        self._tokens_folder = tokens_folder
        self._plan_folder = plan_folder
        self._side = side
        self._num_rows = num_rows
        self._sequence_length = sequence_length
        self._pad_id = pad_id

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        tokens, plan = self._arrays
        return build_row(tokens, plan, int(row), self._sequence_length, self._pad_id)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_arrays", None)
        return state

    @property
    def empty_row(self) -> dict[str, np.ndarray]:
        """A row of padding only."""
        return self[self._num_rows]

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, RowPlan]:
        load = functools.partial(array_cache.load_array, self._plan_folder)
        names = [field.name for field in dataclasses.fields(RowPlan)]
        plan = RowPlan(**{name: load(f"{self._side}_{name}") for name in names})
        return load_tokens(self._tokens_folder), plan


class _ProcessRows(grain.MapDataset):
    """The rows of one process: its contiguous part of every global batch from `first_batch` on.

    Rows past the end of the parent, in the last batch of a finite one, are `empty_row`.
    """

    def __init__(
        self,
        parent: grain.MapDataset,
        *,
        empty_row: dict[str, np.ndarray],
        batch_size: int,
        process_index: int,
        process_count: int,
        first_batch: int,
    ) -> None:
        super().__init__(parent)
        self._empty_row = empty_row
        self._batch_size = batch_size
        self._local_size = batch_size // process_count
        self._offset = process_index * self._local_size
        self._first_batch = first_batch

    def __len__(self) -> int:
        batches = -(-len(self._parent) // self._batch_size)
        # An endless parent is sys.maxsize long; its last part of a batch is out of reach.
        batches = min(batches, sys.maxsize // self._batch_size)
        return max(0, batches - self._first_batch) * self._local_size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        batch, row = divmod(index, self._local_size)
        row += (self._first_batch + batch) * self._batch_size + self._offset
        return self._parent[row] if row < len(self._parent) else self._empty_row


def _plan(
    config: DataConfig, cache_dir: Path, store: TokenStore, validation_store: TokenStore | None
) -> tuple[Path, DataReport, str]:
    """Folder of the row plans of both sides, the report, and a hash of everything in the rows."""
    digests = [store.digest] + ([validation_store.digest] if validation_store else [])
    key = [
        _VERSION,
        digests,
        store.cut,
        config.sequence_length,
        config.packing,
        config.validation_fraction,
        config.split_by,
        config.deduplicate,
    ]
    name = "rows-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]

    def write(folder: Path) -> dict[str, Any]:
        split = split_documents(config, store, validation_store)
        sides = {
            "train": _write_side(config, folder, "train", store, split.train),
            "validation": _write_side(
                config, folder, "validation", validation_store or store, split.validation
            ),
        }
        hashed = hashlib.sha256(json.dumps(digests).encode())
        hashed.update(json.dumps([sides[side].pop("digest") for side in sides]).encode())
        return {
            **sides,
            "split": split.method,
            "duplicates": split.duplicates,
            "in_validation": split.in_validation,
            "digest": hashed.hexdigest()[:32],
        }

    folder, meta = array_cache.cached_entry(cache_dir, name, write)
    validation = SplitReport(**meta["validation"])
    report = DataReport(
        train=SplitReport(**meta["train"]),
        validation=validation if validation.documents else None,
        split=meta["split"],
        read=store.counts,
        read_validation=validation_store.counts if validation_store else None,
        duplicates=meta["duplicates"],
        in_validation=meta["in_validation"],
    )
    return folder, report, meta["digest"]


def _write_side(
    config: DataConfig, folder: Path, side: str, store: TokenStore, documents: np.ndarray
) -> dict[str, Any]:
    """Writes the plan of one side; returns the fields of its `SplitReport` and its `digest`."""
    start = store.start[documents]
    length = store.start[documents + 1] - start
    plan = plan_rows(start, length, config.sequence_length, packing=config.packing)
    digest = hashlib.sha256()
    for field in dataclasses.fields(plan):
        array = getattr(plan, field.name)
        array_cache.save_array(folder, f"{side}_{field.name}", array)
        digest.update(array.tobytes())
    return {
        "documents": len(documents),
        "num_bytes": int(store.num_bytes[documents].sum()),
        "targets": int(length.sum()) - len(documents),
        "pieces": len(plan.piece_start),
        "rows": plan.num_rows,
        "row_positions": plan.num_rows * config.sequence_length,
        "digest": digest.hexdigest(),
    }


def _check_sizes(config: DataConfig, report: DataReport) -> None:
    train = report.train
    if train.targets < config.sequence_length:
        raise DataError(
            f"data.sequence_length={config.sequence_length} is larger than the training corpus, "
            f"which has {train.targets} tokens."
        )
    if train.rows < config.batch_size:
        raise DataError(
            f"data.batch_size={config.batch_size} is larger than the {train.rows} rows of "
            f"{config.sequence_length} tokens that the training corpus makes."
        )
