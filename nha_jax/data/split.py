"""Which documents are for training and which for validation.

The split depends on the contents alone, not on names, order or seed: whole units (files or records)
are ranked by a hash of their bytes and the first ones are validation. Equal units have equal
hashes, so they are on the same side.
"""

import dataclasses
import hashlib
import logging

import numpy as np

from nha_jax.data.config import DataConfig
from nha_jax.data.errors import DataError
from nha_jax.data.token_store import TokenStore

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Split:
    """Documents of each side, in the order of the corpus, and what was left out.

    Attributes:
        train: int64; numbers of documents in the store of `source`.
        validation: int64; numbers of documents in the same store, or in that of
            `validation_source` if there is one.
        method: See `nha_jax.data.report.DataReport.split`.
        duplicates: Documents dropped because an earlier one has the same bytes.
        in_validation: Documents dropped from train because they are in validation.
    """

    train: np.ndarray
    validation: np.ndarray
    method: str
    duplicates: int
    in_validation: int


def split_documents(
    config: DataConfig, store: TokenStore, validation_store: TokenStore | None
) -> Split:
    """Splits a corpus.

    Args:
        config: `validation_fraction`, `split_by` and `deduplicate`.
        store: The corpus of `config.source`.
        validation_store: The corpus of `config.validation_source`, or None.

    Returns:
        The split; no document of train has the same bytes as one of validation.

    Raises:
        DataError: Nothing would be left on one of the sides.
    """
    kept, duplicates = _first_of_each(config, store)
    if validation_store is not None:
        method = "source"
        train = kept
        validation, more = _first_of_each(config, validation_store)
        duplicates += more
        held_out = validation_store.content_hash[validation]
    elif config.validation_fraction == 0:
        return Split(kept, kept[:0], "none", duplicates, 0)
    else:
        method, is_validation = _assign(config, store, kept)
        train, validation = kept[~is_validation], kept[is_validation]
        held_out = store.content_hash[validation]
    leaked = np.isin(store.content_hash[train], held_out)
    train = train[~leaked]
    if not train.size:
        raise DataError(
            "Every document of data.source is in validation too, so nothing is left to train on; "
            "validation needs text of its own."
        )
    if method == "file":
        _warn_of_large_share(config, store, train, validation)
    return Split(train, validation, method, duplicates, int(leaked.sum()))


def _first_of_each(config: DataConfig, store: TokenStore) -> tuple[np.ndarray, int]:
    """Documents without repeats (all of them if repeats are wanted), and the number of repeats."""
    count = len(store.content_hash)
    if not config.deduplicate:
        return np.arange(count), 0
    _, first = np.unique(store.content_hash, return_index=True)
    return np.sort(first), count - len(first)


def _assign(config: DataConfig, store: TokenStore, kept: np.ndarray) -> tuple[str, np.ndarray]:
    """How the split is made and, for each document of `kept`, whether it is validation."""
    if store.cut and len(kept) == 2:
        return "cut", np.array([False, True])
    file = store.file[kept]
    by_file = config.split_by == "file" or (config.split_by == "auto" and len(np.unique(file)) > 1)
    hashes = np.asarray(store.content_hash[kept])
    unit_hash = _hash_per_file(hashes, file) if by_file else hashes
    ranked = np.unique(unit_hash)
    if len(ranked) < 2:
        what = "file" if by_file else "document"
        raise DataError(
            f"The corpus has a single {what}, which cannot be split into train and validation by "
            f"{what}; set data.validation_source, or data.validation_fraction=0"
            + (", or data.split_by='record'." if by_file else ".")
        )
    count = min(max(1, round(config.validation_fraction * len(ranked))), len(ranked) - 1)
    return ("file" if by_file else "record"), unit_hash <= ranked[count - 1]


def _hash_per_file(hashes: np.ndarray, file: np.ndarray) -> np.ndarray:
    """uint64, for each document the hash of its whole file; documents come in file order."""
    result = np.empty(len(hashes), np.uint64)
    bounds = np.flatnonzero(np.diff(file)) + 1
    for part in np.split(np.arange(len(hashes)), bounds):
        digest = hashlib.blake2b(hashes[part].tobytes(), digest_size=8).digest()
        result[part] = int.from_bytes(digest, "little")
    return result


def _warn_of_large_share(
    config: DataConfig, store: TokenStore, train: np.ndarray, validation: np.ndarray
) -> None:
    sizes = [int(store.num_bytes[side].sum()) for side in (train, validation)]
    share = sizes[1] / max(1, sum(sizes))
    if share > 2 * config.validation_fraction:
        _logger.warning(
            "validation is %.0f%% of the bytes where data.validation_fraction asks for %.0f%%: "
            "files are few or of unequal size; data.split_by='record' or data.validation_source "
            "gives another split",
            100 * share,
            100 * config.validation_fraction,
        )
