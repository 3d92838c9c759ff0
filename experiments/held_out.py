"""Text on which a trained model is judged: a file, or what its run kept for validation."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.checkpoints import Loaded
from nha_jax.configuration import ConfigurationError, from_mapping
from nha_jax.data.config import DataConfig
from nha_jax.data.pipeline import open_data


def read_tokens(loaded: Loaded, path: Path) -> list[int]:
    """Token ids of a text file, with begin-of-sequence in front.

    Raises:
        ConfigurationError: the file cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--text: {path} cannot be read ({error}).") from error
    if not text:
        raise ConfigurationError(f"--text: {path} is empty.")
    return [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text)]


def validation_batches(loaded: Loaded, max_batches: int) -> list[dict[str, Any]]:
    """The first batches of the split that the training run validated on.

    Raises:
        ConfigurationError: the run kept no text for validation.
        DataError: the run's text cannot be read.
    """
    data = from_mapping(DataConfig, loaded.run_config["data"], "data")
    validation = open_data(data, vocab_size=loaded.config.vocab_size).validation
    if validation is None:
        raise ConfigurationError(
            "The run kept no text for validation: give a file to be judged on with --text."
        )
    iterator = validation.iterator()
    try:
        return list(itertools.islice(iterator, max_batches))
    finally:
        iterator.close()


def text_batches(
    loaded: Loaded, path: Path, *, length: int, rows: int, max_batches: int
) -> list[dict[str, Any]]:
    """The beginning of a text file as batches, in rows that do not see each other.

    Args:
        loaded: the model.
        path: a UTF-8 text file.
        length: tokens of a row.
        rows: rows of a batch; the last one is filled up with padding.
        max_batches: most batches.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    tokens = read_tokens(loaded, path)
    starts = range(0, len(tokens) - 1, length)
    pieces = (tokens[start : start + length + 1] for start in starts)
    return list(itertools.islice(_batches(pieces, length, rows), max_batches))


def _batches(pieces: Iterator[list[int]], length: int, rows: int) -> Iterator[dict[str, Any]]:
    for batch in itertools.batched(pieces, rows):
        names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
        arrays = {name: np.zeros((rows, length), np.int32) for name in names}
        arrays["positions"][:] = np.arange(length)
        for row, piece in enumerate(batch):
            count = len(piece) - 1
            arrays["tokens"][row, :count] = piece[:-1]
            arrays["targets"][row, :count] = piece[1:]
            arrays["segment_ids"][row, :count] = 1
            arrays["loss_mask"][row, :count] = 1
        yield arrays
