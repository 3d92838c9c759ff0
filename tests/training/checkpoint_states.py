"""A tiny train state with everything that makes saving one hard, for the checkpoint tests."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.struct
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from nha_jax.training.checkpoint import CheckpointConfig, Checkpointer
from nha_jax.training.checkpoint_format import step_name

METRIC = "validation/bits_per_byte"
RUN_CONFIG = {"model": {"width": 8, "windows": [32, None]}, "seed": 0}


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any
    key: Any


def new_state(value: float = 0.0, *, width: int = 8, depth: int = 2, dtype: Any = None) -> State:
    """A state whose every number follows from `value`; masked moments, empty nodes, a typed key."""
    params = {
        "params": {
            "embed": {"embedding": jnp.full((16, width), value, dtype or jnp.float32)},
            "layers": {
                "kernel": jnp.full((depth, width, 3), value + 1, jnp.float32),
                "bias": jnp.full((depth, 5), value + 2, jnp.bfloat16),
            },
        }
    }
    matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-3), matrices)
    )
    moments = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(value, leaf.dtype), optimizer.init(params)
    )
    return State(jnp.int32(value), params, moments, jax.random.key(int(value)))


def abstract(**arguments: Any) -> State:
    """The state of `new_state` as shapes and dtypes, on the default device."""
    return jax.eval_shape(lambda: new_state(**arguments))


def boxed(state: State) -> State:
    """The state with a Flax partitioning box around every parameter."""
    params = jax.tree.map(
        lambda leaf: nn.LogicallyPartitioned(leaf, ("embed",) * leaf.ndim), state.params
    )
    return state.replace(params=params)  # type: ignore[attr-defined]


def assert_same(found: Any, expected: Any) -> None:
    """Same structure, dtypes and bits."""
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(expected)]
    assert structures[0] == structures[1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def new_iterator() -> Any:
    """A Grain iterator over 0, 1, 2, ... in a shuffled order that never repeats."""
    return iter(grain.MapDataset.range(1000).shuffle(seed=3).to_iter_dataset())


def save_steps(directory: Path, *steps: int, **config: Any) -> None:
    """Saves `new_state(step)` at each of `steps`, the iterator advanced by one each time."""
    iterator = new_iterator()
    with Checkpointer(directory, CheckpointConfig(**config)) as checkpointer:
        for step in steps:
            next(iterator)
            checkpointer.save(
                step, new_state(step), data_iterator=iterator, run_config=RUN_CONFIG, wait=True
            )


def step_folder(directory: Path, step: int) -> Path:
    return directory / step_name(step)


def names(directory: Path) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(path.name for path in directory.iterdir())
