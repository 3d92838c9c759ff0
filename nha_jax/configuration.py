"""From nested mappings (a config file, a command line, JSON) to frozen dataclasses, and back.

Every configuration of this library is a frozen dataclass that checks its own values. This module
adds what a dataclass cannot say by itself: an unknown field is refused with the nearest valid name,
and a value of the wrong type with the name of its field, both before anything is built.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Config = TypeVar("Config")


class ConfigurationError(ValueError):
    """A configuration that cannot be used; the message is one sentence meant for the user."""


def unknown_name_message(kind: str, name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Returns one sentence that names an unknown name and the nearest valid one.

    Args:
        kind: what the name should have been, such as "a field of NHAConfig".
        name: the unknown name.
        valid: the valid names.
        prefix: text put before every name in the message, such as "config.model.".
    """
    valid = sorted(valid)
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if nearest:
        return f"{prefix}{name} is not {kind}; did you mean {prefix}{nearest[0]}?"
    return f"{prefix}{name} is not {kind}; valid ones are {', '.join(valid)}."


def from_mapping(cls: type[Config], mapping: Mapping[str, Any], path: str = "config") -> Config:
    """Builds the frozen dataclass `cls` from a mapping of its fields.

    Args:
        cls: a dataclass; fields that are dataclasses themselves take nested mappings.
        mapping: field names to values. Lists are accepted for tuples and integers for floats.
        path: where the mapping stands in the whole configuration, for messages ("config.model").

    Returns:
        An instance of `cls`.

    Raises:
        ConfigurationError: for an unknown or missing field, a value of the wrong type, or a value
            that `cls` itself refuses.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigurationError(
            f"{path} must be a mapping of the fields of {cls.__name__}, "
            f"found {mapping!r} ({type(mapping).__name__})."
        )
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for name in mapping:
        if name not in fields:
            kind = f"a field of {cls.__name__}"
            raise ConfigurationError(unknown_name_message(kind, str(name), fields, f"{path}."))
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in mapping:
            raise ConfigurationError(
                f"{path}.{name} is missing: {cls.__name__} needs it and has no default for it."
            )
    values = {
        name: _convert(hints[name], value, f"{path}.{name}") for name, value in mapping.items()
    }
    try:
        return cls(**values)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def to_mapping(config: Any) -> dict[str, Any]:
    """Returns a dataclass as nested plain dictionaries and lists, ready for JSON."""
    return {
        field.name: _to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)
    }


def changed_fields(old: Any, new: Any, path: str = "config") -> dict[str, tuple[Any, Any]]:
    """Returns the leaves in which two plain configurations differ, as path -> (old, new).

    Args:
        old: nested mappings as from `to_mapping`.
        new: likewise. A field that one side lacks counts as None there.
        path: the name of the root in the returned paths.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changes: dict[str, tuple[Any, Any]] = {}
        for name in list(old) + [name for name in new if name not in old]:
            changes |= changed_fields(old.get(name), new.get(name), f"{path}.{name}")
        return changes
    return {} if old == new else {path: (old, new)}


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Returns `value` as the type `hint` says, or raises a ConfigurationError naming `path`."""
    if not _fits(hint, value):
        raise ConfigurationError(
            f"{path} must be {_describe(hint)}, found {value!r} ({type(value).__name__})."
        )
    for option in _options(hint):
        if _fits(option, value):
            return _coerce(option, value, path)
    return value


def _coerce(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(typing.cast(type, hint), value, path)
    if hint is float:
        return float(value)
    if _is_tuple(hint):
        arguments = typing.get_args(hint)
        if not arguments:
            return tuple(value)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        return tuple(
            _convert(argument, item, f"{path}[{index}]")
            for index, (argument, item) in enumerate(zip(arguments, value, strict=True))
        )
    if isinstance(value, list):
        return tuple(value)
    return value


def _is_tuple(hint: Any) -> bool:
    return hint is tuple or typing.get_origin(hint) is tuple


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value may stand in a field of this type; hints not listed here accept anything."""
    if len(_options(hint)) > 1:
        return any(_fits(option, value) for option in _options(hint))
    if hint is None or hint is types.NoneType:
        return value is None
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, (Mapping, typing.cast(type, hint)))
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return _is_finite_number(value)
    if hint is str:
        return isinstance(value, str)
    if _is_tuple(hint):
        if not isinstance(value, (list, tuple)):
            return False
        arguments = typing.get_args(hint)
        return not arguments or arguments[-1] is Ellipsis or len(arguments) == len(value)
    return True


def _is_finite_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold; range checks are blind to NaN."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _describe(hint: Any) -> str:
    """A type as a reader of a config file would call it."""
    if len(_options(hint)) > 1:
        return " or ".join(_describe(option) for option in _options(hint))
    if hint is None or hint is types.NoneType:
        return "None"
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return f"the fields of {typing.cast(type, hint).__name__}"
    if _is_tuple(hint):
        return "a list"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a finite number",
        str: "a string",
    }
    return names.get(hint, str(hint))
