"""Window specifications: every form they are written in, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.ops.windows import (
    FULL,
    format_windows,
    is_windows_array,
    parse_window,
    parse_windows,
    windows_array,
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("64", (64,) * 4),
        (64, (64,) * 4),
        (np.int32(64), (64,) * 4),
        ("full", (None,) * 4),
        (None, (None,) * 4),
        (FULL, (None,) * 4),
        (0, (0,) * 4),
        ("64,full@3", (64, 64, 64, None)),
        ("0,64@1,3,full@2", (0, 64, None, 64)),
        (" 0 , 64@ 1 , 3 ,full@2 ", (0, 64, None, 64)),
        ("full,8@0", (8, None, None, None)),
        ([0, None, "full", 7], (0, None, None, 7)),
        ((1, 2, 3, "4"), (1, 2, 3, 4)),
    ],
)
def test_every_form_is_read(spec, expected):
    assert parse_windows(spec, 4) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "''"),
        ("sixty", "'sixty'"),
        ("-1", "'-1'"),
        (-1, "-1"),
        (True, "True"),
        (1.5, "1.5"),
        ("64,full", "'full' names no layers"),
        ("full@3", "must begin with the window of the layers"),
        ("64,full@4", "'4' is not a layer: layers of this model are 0 to 3"),
        ("64,full@-1", "'-1' is not a layer"),
        ("64,full@", "'' is not a layer"),
        ("64,full@1,8@1", "names layer 1 twice"),
        ("64,@1", "''"),
        ([64, 64], "lists 2 layers, but the model has 4"),
        ([64, 64, 64, 1.5], "1.5"),
        (2**31, "2147483648"),
    ],
)
def test_what_cannot_be_read_is_named(spec, message):
    with pytest.raises(ValueError) as error:
        parse_windows(spec, 4)
    assert message in str(error.value)
    assert str(error.value).count("\n") == 0


def test_formatting_is_read_back():
    rng = np.random.default_rng(0)
    choices = [0, 8, 64, None]
    for _ in range(50):
        windows = tuple(choices[i] for i in rng.integers(0, 4, size=rng.integers(1, 12)))
        assert parse_windows(format_windows(windows), len(windows)) == windows


def test_formatting_names_the_most_frequent_window_first():
    assert format_windows((64, 64, 64, None, 64, None)) == "64,full@3,5"
    assert format_windows((None, None)) == "full"
    with pytest.raises(ValueError, match="empty"):
        format_windows(())


def test_windows_as_data():
    array = windows_array((0, 64, None))
    assert array.dtype == jnp.int32
    assert array.tolist() == [0, 64, 2**31 - 1]
    assert tuple(parse_window(entry) for entry in array.tolist()) == (0, 64, None)


def test_arrays_are_told_from_specifications():
    assert is_windows_array(jnp.zeros(3, jnp.int32))
    assert is_windows_array(np.zeros(3, np.int32))
    for spec in ("64", 64, np.int32(64), None, (64, None), [64]):
        assert not is_windows_array(spec)
