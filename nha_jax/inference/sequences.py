"""The sequences in a batched state: taken out, duplicated, put back, and how many bytes they are.

Every array of a state has the batch axis first, so that a server or a beam search can move whole
sequences about without knowing what a layer keeps of them. All of it may run inside jit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from nha_jax.models.language_model import LanguageModelState


def select_sequences(state: LanguageModelState, rows: Int[Array, " R"]) -> LanguageModelState:
    """Gathers sequences: row i of the result is row `rows[i]` of the state.

    Args:
        state: State of B sequences.
        rows: [R] integers from 0 to B - 1; one that stands twice is duplicated.

    Returns:
        A state of R sequences; the one given is not changed.

    Raises:
        ValueError: `rows` is not a vector of integers, or (where it is concrete) out of range.
    """
    rows = _checked_rows(rows, _batch(state), "rows")
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), state)


def replace_sequences(
    state: LanguageModelState, rows: Int[Array, " R"], other: LanguageModelState
) -> LanguageModelState:
    """Puts sequences in the place of others: row `rows[i]` becomes row i of `other`.

    Args:
        state: State of B sequences.
        rows: [R] integers from 0 to B - 1, each at most once.
        other: State of R sequences with the windows, capacity and dtypes of `state`.

    Returns:
        A state of B sequences; those given are not changed (donate `state` to write in place).

    Raises:
        ValueError: `rows` is out of range or holds a row twice (where it is concrete), or `other`
            is a state of another kind.
    """
    rows = _checked_rows(rows, _batch(state), "rows")
    if not isinstance(rows, jax.core.Tracer) and np.unique(rows).size < rows.shape[0]:
        raise ValueError(f"rows must name each sequence once, but was {np.asarray(rows).tolist()}.")
    if other.windows != state.windows:
        raise ValueError(
            f"other is a state for the windows {other.windows}, but must be for those of state, "
            f"{state.windows}."
        )

    def put(leaf: Any, new: Any) -> jax.Array:
        expected = (rows.shape[0], *leaf.shape[1:])
        if new.shape != expected or new.dtype != leaf.dtype:
            raise ValueError(
                f"other holds an array of shape {new.shape} and dtype {new.dtype} where state "
                f"needs {expected} and {leaf.dtype}: make both with one capacity and dtype."
            )
        return leaf.at[rows].set(new)

    return jax.tree.map(put, state, other)


def layer_bytes(state: LanguageModelState) -> list[int]:
    """Bytes of each layer's state, all its sequences together; works on shapes alone too."""
    return [
        sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(layer))
        for layer in state.layers
    ]


def smallest_capacity(state: LanguageModelState) -> int | None:
    """The most tokens a sequence of the state may come to; None where no layer sets a limit."""
    capacities = [layer.memory.capacity for layer in state.layers if layer.memory.window is None]
    return min(capacities) if capacities else None


def _batch(state: LanguageModelState) -> int:
    return state.length.shape[0]


def _checked_rows(rows: Any, batch: int, name: str) -> jax.Array:
    rows = rows if isinstance(rows, jax.Array) else np.asarray(rows)
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be a vector of integers, but has shape {rows.shape} and dtype "
            f"{rows.dtype}."
        )
    if not isinstance(rows, jax.core.Tracer):
        outside = np.asarray(rows)[(np.asarray(rows) < 0) | (np.asarray(rows) >= batch)]
        if outside.size:
            raise ValueError(
                f"{name} has {outside[0]}, but must be from 0 to {batch - 1}, the sequences of the "
                "state."
            )
    return jnp.asarray(rows)
