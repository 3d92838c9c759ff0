"""A run that moves from mesh to mesh: what one saves another continues, with the same losses."""

from pathlib import Path

import jax
import numpy as np

from nha_jax.configuration import to_mapping
from nha_jax.training.checkpoint import CheckpointConfig, Checkpointer
from nha_jax.training.program import build_program
from nha_jax.training.sharding import MeshConfig, make_mesh, put_batch
from tests.training.tiny import packed_batch, tiny_config

MESHES = (
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(data=1, fsdp=2, context=2),
    MeshConfig(data=1),
    MeshConfig(data=8),
)


def test_eight_four_one_and_eight_devices_train_as_one_does(tmp_path: Path) -> None:
    config = tiny_config()
    batches = [packed_batch(config, seed) for seed in range(len(MESHES))]
    byte_lengths = np.ones(config.model.vocab_size, np.int32)

    alone = build_program(config, make_mesh(MeshConfig(data=1), jax.devices()[:1]), byte_lengths)
    expected = []
    with jax.set_mesh(alone.mesh):
        state = alone.init()
        for batch in batches:
            state, metrics = alone.train_step(state, put_batch(batch, alone.batch_sharding))
            expected.append(float(metrics["loss"]))

    found = []
    for step, (sizes, batch) in enumerate(zip(MESHES, batches, strict=True), start=1):
        count = abs(sizes.data * sizes.fsdp * sizes.context * sizes.tensor)
        program = build_program(config, make_mesh(sizes, jax.devices()[:count]), byte_lengths)
        with jax.set_mesh(program.mesh), Checkpointer(tmp_path, CheckpointConfig()) as checkpoints:
            restored = checkpoints.restore(program.abstract_state, data_iterator=None)
            assert (restored is None) == (step == 1)
            state = program.init() if restored is None else restored.state
            state, metrics = program.train_step(state, put_batch(batch, program.batch_sharding))
            found.append(float(metrics["loss"]))
            checkpoints.save(
                step, state, data_iterator=None, run_config=to_mapping(config), wait=True
            )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
