"""A state of sequences as a file, to go on another day: one .npz with arrays and a description."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nha_jax.models.language_model import LanguageModelState, NHALanguageModel
from nha_jax.ops.windows import format_windows, parse_windows

_FORMAT = "nha_jax state"
_VERSION = 1
_DESCRIPTION = "description"


class StateFileError(ValueError):
    """A state cannot be read from a file, or is for another model; one sentence for the user."""


def save_state(path: str | os.PathLike[str], state: LanguageModelState) -> None:
    """Writes a state; the file is complete or not there, whatever happens meanwhile.

    Args:
        path: the file; one that exists is replaced.
        state: the state of any number of sequences.
    """
    path = Path(path)
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(state))
    arrays: dict[str, Any] = {}
    dtypes = {}
    for place, leaf in leaves:
        name = jax.tree_util.keystr(place)
        dtypes[name] = leaf.dtype.name
        # NumPy's files have no bfloat16: the bits go in as integers.
        arrays[name] = leaf.view(np.uint16) if leaf.dtype == jnp.bfloat16 else leaf
    description = {
        "format": _FORMAT,
        "version": _VERSION,
        "windows": format_windows(state.windows),
        "sequences": int(state.length.shape[0]),
        "capacity": [layer.memory.capacity for layer in state.layers],
        "dtypes": dtypes,
    }
    arrays[_DESCRIPTION] = np.frombuffer(json.dumps(description).encode(), np.uint8)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_state(path: str | os.PathLike[str], model: NHALanguageModel) -> LanguageModelState:
    """Reads a state that `save_state` wrote.

    Args:
        path: the file.
        model: the model that is to go on; its windows do not matter, those of the state are kept.

    Returns:
        The state, on the default device.

    Raises:
        StateFileError: the file is missing, damaged, no state or of another format version, or the
            state is that of a model of another shape.
    """
    path = Path(path)
    try:
        # NumPy leaves a broken file open where it opened it itself.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}  # its checksums are compared here
        description = json.loads(arrays.pop(_DESCRIPTION).tobytes())
        is_state = description["format"] == _FORMAT
    except FileNotFoundError:
        raise StateFileError(f"The state file {path} does not exist.") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise StateFileError(f"{path} is not a state file, or is damaged ({error}).") from error
    if not is_state or description["version"] != _VERSION:
        raise StateFileError(
            f"{path} has the format {description['format']!r}, version "
            f"{description['version']!r}, but this library reads {_FORMAT!r}, version {_VERSION}."
        )
    return _restore(path, model, arrays, description)


def _restore(
    path: Path, model: NHALanguageModel, arrays: dict[str, np.ndarray], description: dict[str, Any]
) -> LanguageModelState:
    capacities = description["capacity"]
    if len(capacities) != model.config.num_layers:
        raise StateFileError(
            f"{path} is the state of a model of {len(capacities)} layers, but this one has "
            f"{model.config.num_layers}."
        )
    windows = parse_windows(description["windows"], len(capacities))
    full = [rows for rows, window in zip(capacities, windows, strict=True) if window is None]
    expected = jax.eval_shape(
        lambda: model.init_state(
            description["sequences"],
            windows=windows,
            capacity=full[0] if full else None,
        )
    )
    places, structure = jax.tree_util.tree_flatten_with_path(expected)
    leaves = []
    for place, wanted in places:
        name = jax.tree_util.keystr(place)
        array = arrays.pop(name, None)
        if array is None:
            raise StateFileError(f"{path} is the state of another model: it lacks {name}.")
        dtype = jnp.dtype(description["dtypes"][name])
        array = array.view(dtype) if dtype == jnp.bfloat16 else array
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise StateFileError(
                f"{path} is the state of another model: {name} is {array.dtype} of shape "
                f"{array.shape}, but this model needs {wanted.dtype} of shape {wanted.shape}."
            )
        leaves.append(jnp.asarray(array))
    if arrays:
        raise StateFileError(f"{path} is the state of another model: it has {min(arrays)} besides.")
    return jax.tree.unflatten(structure, leaves)
