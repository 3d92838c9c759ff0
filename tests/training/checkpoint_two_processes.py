"""One of two processes that train, save and restore together, for `test_checkpoint_processes`.

python -m tests.training.checkpoint_two_processes PROCESS_INDEX PORT DIRECTORY
"""

import errno
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nha_jax.training import checkpoint_folder
from nha_jax.training.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from nha_jax.training.integrity import write_manifest
from tests.training.checkpoint_states import RUN_CONFIG, State, new_iterator, new_state, step_folder


def fail_with_full_disk(folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def main(process: int, port: int, directory: Path) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def init() -> State:
        return new_state(3).replace(params={"w": jnp.arange(1000.0)})  # type: ignore[attr-defined]

    abstract = jax.eval_shape(init)
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), abstract)
    shardings = shardings.replace(params={"w": NamedSharding(mesh, PartitionSpec("data"))})
    state = jax.jit(init, out_shardings=shardings)()
    wanted = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        shardings,
    )
    iterator = new_iterator()
    for _ in range(process + 1):
        next(iterator)
    with Checkpointer(directory, CheckpointConfig(keep_last=2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state, data_iterator=iterator, run_config=RUN_CONFIG)
        checkpointer.wait()
        print("latest", checkpointer.latest_step())
        expected = next(iterator)
        if process == 0:
            (step_folder(directory, 3) / "data" / "process_1-of-2.json").unlink()
        multihost_utils.sync_global_devices("damaged")
        iterator = new_iterator()
        restored = checkpointer.restore(wanted, data_iterator=iterator)
        assert restored is not None
        (shard,) = restored.state.params["w"].addressable_shards
        print("restored", restored.step, float(shard.data.sum()), next(iterator) == expected)

        # Process 0 alone writes the manifest; its failure must not be a success to the other.
        if process == 0:
            checkpoint_folder.write_manifest = fail_with_full_disk
        try:
            checkpointer.save(4, state, data_iterator=iterator, run_config=RUN_CONFIG, wait=True)
        except CheckpointError as error:
            print(error)
        checkpoint_folder.write_manifest = write_manifest
        try:
            wanted.params["w"] = jax.ShapeDtypeStruct((9,), jnp.float32)
            checkpointer.restore(wanted, data_iterator=iterator)
        except CheckpointError as error:
            print(error)
        checkpointer.save(5, state, data_iterator=iterator, run_config=RUN_CONFIG)
    print("finished", checkpointer.latest_step())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
