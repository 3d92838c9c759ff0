import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nha_jax.data.config import DataConfig
from nha_jax.data.pipeline import TextData, open_data

BYTES_VOCABULARY = 259


@pytest.fixture
def documents() -> list[bytes]:
    """60 different texts of 1 to 300 bytes, all bytes allowed."""
    rng = random.Random(0)
    return [bytes([i]) + rng.randbytes(rng.choice([0, 3, 17, 60, 299])) for i in range(60)]


@pytest.fixture
def corpus(tmp_path: Path, documents: list[bytes]) -> Path:
    """A folder with one text file per document."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i, document in enumerate(documents):
        (folder / f"{i:03}.txt").write_bytes(document)
    return folder


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """DataConfig with small sizes and a cache of the test's own."""

    def make(source: Any, **changes: Any) -> DataConfig:
        source = tuple(map(str, source)) if isinstance(source, tuple) else str(source)
        fields = {"sequence_length": 32, "batch_size": 4, "cache_dir": str(tmp_path / "cache")}
        return DataConfig(source=source, **{**fields, **changes})

    return make


@pytest.fixture
def open_text(make_config: Callable[..., DataConfig]) -> Callable[..., TextData]:
    """Opens a corpus with the bytes tokenizer's vocabulary."""

    def open_(source: Any, **changes: Any) -> TextData:
        shares = {
            name: changes.pop(name)
            for name in ("vocab_size", "process_index", "process_count")
            if name in changes
        }
        return open_data(
            make_config(source, **changes), **{"vocab_size": BYTES_VOCABULARY, **shares}
        )

    return open_
