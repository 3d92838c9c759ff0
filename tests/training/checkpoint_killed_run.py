"""A training run in miniature that saves at every step, to be killed by `test_checkpoint_kill`.

    python -m tests.training.checkpoint_killed_run DIRECTORY LAST_STEP

Prints `restored STEP`, then `committed STEP` whenever the checkpointer says so, and at the end
`done DIGEST`.
"""

import hashlib
import sys
from typing import Any

import flax.struct
import grain
import jax
import jax.numpy as jnp
import numpy as np

from nha_jax.training.checkpoint import CheckpointConfig, Checkpointer

SIZE = 100_000


@flax.struct.dataclass
class State:
    params: Any
    last_batch: Any


def new_state() -> State:
    return State({"w": jnp.arange(SIZE, dtype=jnp.uint32)}, jnp.uint32(0))


def new_iterator() -> Any:
    return iter(grain.MapDataset.range(1 << 20).shuffle(seed=1).to_iter_dataset())


@jax.jit
def train_step(state: State, batch: jax.Array) -> State:
    """Integers, so that each step leaves its mark on every later one to the last bit."""
    return State({"w": state.params["w"] * 1_664_525 + batch}, batch)


def digest(state: State) -> str:
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))
    ).hexdigest()


def undisturbed(last_step: int) -> str:
    """The digest of the state after `last_step` steps that nothing interrupted."""
    state, iterator = new_state(), new_iterator()
    for _ in range(last_step):
        state = train_step(state, jnp.uint32(next(iterator)))
    return digest(state)


def main(directory: str, last_step: int) -> None:
    iterator = new_iterator()
    with Checkpointer(directory, CheckpointConfig(keep_last=2, keep_best=0)) as checkpointer:
        restored = checkpointer.restore(jax.eval_shape(new_state), data_iterator=iterator)
        step, state = (restored.step, restored.state) if restored else (0, new_state())
        print("restored", step, flush=True)
        while step < last_step:
            state = train_step(state, jnp.uint32(next(iterator)))
            step += 1
            checkpointer.save(step, state, data_iterator=iterator, run_config={})
            print("committed", checkpointer.latest_step() or 0, flush=True)
    print("done", digest(state), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
