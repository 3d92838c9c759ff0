"""Per-layer windows: how they are written, read and handed to compiled code.

A window is the number of tokens a layer sees exactly, the token itself included. In static
specifications a full window (causal attention over everything) is ``None``; in arrays, where
windows are data, it is `FULL`, which no sequence is as long as.
"""

import collections
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

FULL = 2**31 - 1
"""A full window in an int32 array of windows."""

Window = int | None
"""One static window: a number of tokens, or None for full attention."""

_VALID = (
    'a whole number of tokens from 0, "full", a string such as "64,full@3,11", or a list with one '
    "entry a layer"
)


def parse_windows(
    spec: "str | int | None | Sequence[object]", num_layers: int
) -> tuple[Window, ...]:
    """Reads a specification of per-layer windows.

    Args:
        spec: one of
            an int, ``None`` or ``"full"``: that window in every layer;
            a string ``"64"`` or ``"64,full@3,11,19,27"``: the first entry is the window of every
            layer not named after it, and each ``value@layer,layer,...`` sets those layers (counted
            from 0, each named at most once);
            a list or tuple with one entry (int, ``None`` or ``"full"``) a layer.
        num_layers: number of layers of the model.

    Returns:
        One window a layer, ``None`` for full attention.

    Raises:
        ValueError: the specification is malformed or does not fit `num_layers`.
    """
    if isinstance(spec, str):
        return _parse_string(spec, num_layers)
    if isinstance(spec, Sequence):
        if len(spec) != num_layers:
            raise ValueError(
                f"windows lists {len(spec)} layers, but the model has {num_layers}: give one "
                "window a layer."
            )
        return tuple(parse_window(entry) for entry in spec)
    return (parse_window(spec),) * num_layers


def parse_window(entry: object) -> Window:
    """Reads one window: an int from 0, ``None`` or ``"full"``, or an int written as a string.

    Raises:
        ValueError: `entry` is none of these.
    """
    if entry is None:
        return None
    if isinstance(entry, str):
        text = entry.strip()
        if text == "full":
            return None
        if not text.isdecimal():
            raise ValueError(f"A window is {entry!r}, but must be {_VALID}.")
        value = int(text)
    else:
        try:
            if isinstance(entry, bool):
                raise TypeError
            value = operator.index(entry)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(f"A window is {entry!r}, but must be {_VALID}.") from None
    if not 0 <= value <= FULL:
        raise ValueError(f"A window is {value}, but must be from 0 to {FULL} tokens, or full.")
    return None if value == FULL else value


def parse_window_choices(choices: "str | int | None | Sequence[object]") -> tuple[Window, ...]:
    """Reads windows to choose from, for each layer by itself.

    Args:
        choices: a string such as "16,64,full", one number, or a list or tuple of what
            `parse_window` reads; None for no choice at all.

    Returns:
        The windows in the order given, none of them twice.

    Raises:
        ValueError: one of them is no window.
    """
    if choices is None:
        return ()
    entries = choices.split(",") if isinstance(choices, str) else choices
    if not isinstance(entries, Sequence):
        entries = (entries,)
    return tuple(dict.fromkeys(parse_window(entry) for entry in entries))


def _parse_string(spec: str, num_layers: int) -> tuple[Window, ...]:
    first, *rest = [part.strip() for part in spec.split(",")]
    if "@" in first:
        raise ValueError(
            f"windows is {spec!r}, but must begin with the window of the layers not named, "
            'as in "64,full@3,11".'
        )
    windows = [parse_window(first)] * num_layers
    value: Window = None
    named: set[int] = set()
    for index, part in enumerate(rest):
        if "@" in part:
            text, part = part.split("@", 1)
            value = parse_window(text)
        elif index == 0:
            raise ValueError(
                f"windows is {spec!r}, where {part!r} names no layers: write value@layer,layer "
                'after the first entry, as in "64,full@3,11".'
            )
        part = part.strip()
        if not part.isdecimal() or int(part) >= num_layers:
            raise ValueError(
                f"windows is {spec!r}, where {part!r} is not a layer: layers of this model are 0 "
                f"to {num_layers - 1}."
            )
        layer = int(part)
        if layer in named:
            raise ValueError(f"windows is {spec!r}, which names layer {layer} twice: name it once.")
        named.add(layer)
        windows[layer] = value
    return tuple(windows)


def format_windows(windows: Sequence[Window]) -> str:
    """Writes per-layer windows in the short form that `parse_windows` reads back.

    The most frequent window comes first, the others follow with their layers:
    ``"64,full@3,11,19,27"``.
    """
    names = ["full" if window is None else str(window) for window in windows]
    layers: dict[str, list[int]] = collections.defaultdict(list)
    for layer, name in enumerate(names):
        layers[name].append(layer)
    if not layers:
        raise ValueError("windows is empty, but must have one entry a layer.")
    default = max(layers, key=lambda name: len(layers[name]))
    exceptions = [
        f"{name}@{','.join(map(str, where))}" for name, where in layers.items() if name != default
    ]
    return ",".join([default, *exceptions])


def windows_array(windows: Sequence[Window]) -> Int32[Array, "L"]:
    """Encodes per-layer windows as an int32 array, for calls that take windows as data."""
    return jnp.asarray([FULL if window is None else window for window in windows], jnp.int32)


def is_windows_array(windows: object) -> bool:
    """Whether `windows` is data (an array of JAX or NumPy) rather than a static specification."""
    return isinstance(windows, jax.Array | np.ndarray)
