"""Mappings become dataclasses, and every mistake in one is a sentence that names the field."""

import dataclasses
import json
import re
from typing import Any, Literal

import pytest

from nha_jax.configuration import ConfigurationError, changed_fields, from_mapping, to_mapping


@dataclasses.dataclass(frozen=True)
class Inner:
    factor: float
    kind: Literal["linear", "cubic"] = "linear"


@dataclasses.dataclass(frozen=True)
class Outer:
    width: int
    rate: float = 1.0
    name: str = "a"
    flag: bool = False
    limit: float | None = None
    paths: str | tuple[str, ...] = "p"
    pair: tuple[int, int] = (1, 2)
    inner: Inner | None = None

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be 1 or more, found {self.width}.")


def test_values_take_the_types_of_their_fields() -> None:
    outer = from_mapping(
        Outer,
        {
            "width": 3,
            "rate": 2,
            "limit": 1,
            "paths": ["x", "y"],
            "pair": [3, 4],
            "inner": {"factor": 2},
        },
    )
    expected = Outer(3, 2.0, limit=1.0, paths=("x", "y"), pair=(3, 4), inner=Inner(2.0))
    assert outer == expected
    assert isinstance(outer.rate, float)
    assert from_mapping(Outer, json.loads(json.dumps(to_mapping(outer)))) == outer


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"widht": 3}, "config.widht is not a field of Outer; did you mean config.width?"),
        (
            {"width": 1, "inner": {"factr": 1}},
            "config.inner.factr is not a field of Inner; did you mean config.inner.factor?",
        ),
        ({"width": 1, "zzz": 1}, "config.zzz is not a field of Outer; valid ones are flag, inner,"),
        ({}, "config.width is missing"),
        ({"width": "3"}, "config.width must be an integer, found '3' (str)."),
        ({"width": True}, "config.width must be an integer, found True (bool)."),
        ({"width": 1.0}, "config.width must be an integer, found 1.0 (float)."),
        ({"width": 1, "rate": None}, "config.rate must be a finite number, found None (NoneType)."),
        (
            {"width": 1, "limit": "x"},
            "config.limit must be a finite number or None, found 'x' (str).",
        ),
        (
            {"width": 1, "rate": float("inf")},
            "config.rate must be a finite number, found inf (float).",
        ),
        ({"width": 1, "rate": 10**400}, "config.rate must be a finite number, found 1000"),
        ({"width": 1, "flag": 1}, "config.flag must be true or false, found 1 (int)."),
        ({"width": 1, "name": 7}, "config.name must be a string, found 7 (int)."),
        ({"width": 1, "paths": ["a", 1]}, "config.paths[1] must be a string, found 1 (int)."),
        ({"width": 1, "pair": [1, 2, 3]}, "config.pair must be a list, found [1, 2, 3] (list)."),
        (
            {"width": 1, "inner": {"factor": 1, "kind": "cubc"}},
            "config.inner.kind must be one of 'linear', 'cubic', found 'cubc' (str).",
        ),
        ({"width": 1, "inner": 3}, "config.inner must be the fields of Inner or None, found 3"),
        ({"width": 0}, "config: width must be 1 or more, found 0."),
        ("width", "config must be a mapping of the fields of Outer, found 'width' (str)."),
    ],
)
def test_mistakes_are_named(mapping: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        from_mapping(Outer, mapping)


def test_changed_fields_are_leaves_with_both_values() -> None:
    old = {"a": {"b": 1, "c": 2}, "gone": 3}
    new = {"a": {"b": 1, "c": 4}, "came": [1]}
    assert changed_fields(old, new) == {
        "config.a.c": (2, 4),
        "config.gone": (3, None),
        "config.came": (None, [1]),
    }
