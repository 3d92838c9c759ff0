"""A checkpoint of a small random model over bytes, as a run would leave it."""

from pathlib import Path
from typing import Any

import numpy as np

from nha_jax.configuration import from_mapping, to_mapping
from nha_jax.models.config import NHAConfig
from nha_jax.training.checkpoint import CheckpointConfig, Checkpointer
from nha_jax.training.config import RunConfig
from nha_jax.training.step import TrainState
from tests.inference.small import params_of

MODEL = NHAConfig(
    vocab_size=259,
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    key_width=8,
    feed_forward_width=24,
    num_slots=4,
    windows="4,full@1",
    tie_embeddings=False,
    dtype="float32",
)

# For programs that tests start: compiling is most of what they take.
QUICK_TO_COMPILE = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}


def save_checkpoint(workdir: Path, data: dict[str, Any] | None = None) -> Path:
    """Writes step 1 of a run with such a model into `workdir/checkpoints`; returns `workdir`."""
    config = from_mapping(
        RunConfig,
        {
            "model": MODEL.to_dict(),
            "data": {"sequence_length": 32, "batch_size": 4} | (data or {}),
            "optimizer": {"peak_learning_rate": 1e-3},
            "train": {"steps": 1},
        },
    )
    zero = np.zeros((), np.int32)
    state = TrainState(zero, params_of(MODEL), opt_state=(), skipped=zero, skipped_in_a_row=zero)
    with Checkpointer(workdir / "checkpoints", CheckpointConfig()) as checkpointer:
        checkpointer.save(
            1, state, data_iterator=None, run_config=to_mapping(config), metrics={}, wait=True
        )
    return workdir
