"""Train states as trees: paths, shapes and dtypes compared, parameters split off and joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax.core import meta

from nha_jax.training.checkpoint_format import CheckpointMismatchError

_MISMATCHES_SHOWN = 12


def unbox(tree: Any) -> Any:
    """Removes Flax's partitioning boxes, so that paths and structure are those of the arrays."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, meta.Partitioned) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned),
    )


def describe_tree(tree: Any) -> dict[str, dict[str, Any]]:
    """Path ("params/layers/...") of every leaf -> {"shape": [...], "dtype": "float32"}.

    Raises:
        TypeError: a leaf is neither an array nor a `jax.ShapeDtypeStruct`.
    """
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(unbox(tree)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"the leaf {name} of the train state must be an array, found {type(leaf).__name__}."
            )
        described[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    return described


def check_same_tree(
    found: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]], where: Path
) -> None:
    """Compares the leaves of a checkpoint with those that are wanted.

    Orbax itself would cast another dtype without a word.

    Raises:
        CheckpointMismatchError: names the paths that differ, what was found, what was expected.
    """

    def show(entry: Mapping[str, Any] | None) -> str:
        if entry is None:
            return "nothing"
        return f"{entry['dtype']}[{','.join(str(size) for size in entry['shape'])}]"

    # Parameters first: the moments of the optimizer only repeat what is wrong with them.
    paths = sorted({*found, *expected}, key=lambda path: (not path.startswith("params/"), path))
    lines = [
        f"{path}: found {show(found.get(path))}, expected {show(expected.get(path))}"
        for path in paths
        if found.get(path) != expected.get(path)
    ]
    if lines:
        more = len(lines) - _MISMATCHES_SHOWN
        shown = "; ".join(lines[:_MISMATCHES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointMismatchError(
            f"{where} was saved by another model or optimizer than this run's, "
            f"{len(lines)} of its arrays differ: {shown}"
        )


def split_params(state: Any) -> tuple[Any, Any]:
    """Splits a train state into its parameters and the rest, where `params` is None.

    Args:
        state: a dataclass (`flax.struct`) or named tuple with a field `params`.

    Raises:
        TypeError: it is something else.
    """
    if not hasattr(state, "params"):
        raise TypeError(
            f"a train state must be a dataclass or named tuple with a field 'params', "
            f"found {type(state).__name__}."
        )
    return state.params, join_params(None, state)


def join_params(params: Any, rest: Any) -> Any:
    """Puts parameters into the rest of the train state that they were split from."""
    if dataclasses.is_dataclass(rest) and not isinstance(rest, type):
        return dataclasses.replace(rest, params=params)
    return rest._replace(params=params)


def with_sharding(leaf: Any, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Gives an abstract array a place: `sharding`, or its own, or else the default device."""
    place = sharding or leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
