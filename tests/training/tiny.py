"""A run configuration small enough for a test: one hybrid layer over bytes."""

import copy
from typing import Any

import numpy as np

from nha_jax.configuration import from_mapping
from nha_jax.training.config import RunConfig

_CONFIG: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 260,
        "num_layers": 1,
        "width": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "key_width": 8,
        "feed_forward_width": 32,
        "num_slots": 4,
        "windows": "4",
        "dtype": "float32",
    },
    "data": {"sequence_length": 16, "batch_size": 8},
    "optimizer": {"peak_learning_rate": 1e-2, "warmup_steps": 2, "decay_steps": 20},
    "train": {"steps": 4, "log_every_steps": 1, "tensorboard": False},
    "mesh": {"data": 1},
}


def tiny_config(**changes: Any) -> RunConfig:
    """The configuration, with fields replaced: `tiny_config(**{"model.num_slots": 0})`."""
    config = copy.deepcopy(_CONFIG)
    for path, value in changes.items():
        section, field = path.split(".")
        config.setdefault(section, {})[field] = value
    return from_mapping(RunConfig, config)


def packed_batch(config: RunConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch whose rows hold very different numbers of targets, with two documents and padding."""
    rng = np.random.default_rng(seed)
    rows, length = config.data.batch_size, config.data.sequence_length
    tokens = rng.integers(0, 256, (rows, length), dtype=np.int32)
    segment_ids = np.zeros((rows, length), np.int32)
    positions = np.zeros((rows, length), np.int32)
    for row in range(rows):
        end = length if row % 4 == 0 else int(rng.integers(2, length))
        middle = end // 2
        segment_ids[row, :middle] = 1
        segment_ids[row, middle:end] = 2
        positions[row, :middle] = np.arange(middle)
        positions[row, middle:end] = np.arange(end - middle)
    targets = rng.integers(0, 256, (rows, length), dtype=np.int32)
    loss_mask = ((segment_ids > 0) & (rng.random((rows, length)) < 0.8)).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": loss_mask,
    }
