"""Sequences of a state are gathered, duplicated, replaced, counted in bytes, saved and loaded."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.inference.prefill import pad_prompts, prefill
from nha_jax.inference.sequences import layer_bytes, replace_sequences, select_sequences
from nha_jax.inference.state_file import StateFileError, load_state, save_state
from nha_jax.models.language_model import NHALanguageModel
from tests.inference.small import MIXED, MODEL, params_of, prompts_of, relative_error

CAPACITY = 128


def _prefilled(prompts, state=None):
    tokens, ids = pad_prompts(prompts)
    capacity = CAPACITY if state is None else None
    return prefill(
        MODEL, params_of(MIXED), tokens, segment_ids=ids, state=state, capacity=capacity, chunk=16
    )


def test_gathered_duplicated_and_replaced_sequences_go_on_as_their_own():
    prompts = prompts_of([20, 3, 75])
    _, state = _prefilled(prompts)
    moved = select_sequences(state, np.array([2, 0, 2]))
    _, others = _prefilled(prompts_of([9, 9, 9], seed=1))
    # Row 0 stays one of the others, row 1 becomes prompt 2, row 2 prompt 0.
    mixed = replace_sequences(others, jnp.array([1, 2]), select_sequences(moved, np.array([0, 1])))
    more = prompts_of([2, 5, 3], seed=2)
    logits, _ = _prefilled(more, mixed)
    whole = [prompts_of([9], seed=1)[0] + more[0], prompts[2] + more[1], prompts[0] + more[2]]
    expected, _ = _prefilled(whole)
    assert relative_error(logits, expected) < 1e-5


def test_bytes_of_a_layer_do_not_grow_where_it_has_a_window():
    sizes = {
        capacity: layer_bytes(jax.eval_shape(lambda c=capacity: MODEL.init_state(2, capacity=c)))
        for capacity in (100, 1000)
    }
    assert sizes[100][:3] == sizes[1000][:3]
    # Keys and values of one more token: 2 sequences, 2 heads, widths 4 and 6, float32.
    assert sizes[1000][3] - sizes[100][3] == 900 * 2 * 2 * (4 + 6) * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_comes_back_from_its_file_bit_for_bit(tmp_path, dtype):
    model = NHALanguageModel(dataclasses.replace(MIXED, dtype=dtype))
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: jnp.asarray(10 * rng.normal(size=leaf.shape), leaf.dtype),
        model.init_state(2, capacity=9),
    )
    save_state(tmp_path / "state.npz", state)
    other_windows = NHALanguageModel(dataclasses.replace(model.config, windows="3"))
    loaded = load_state(tmp_path / "state.npz", other_windows)
    assert loaded.windows == state.windows
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), loaded, state)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]


def _rewrite(path, **changes):
    arrays = dict(np.load(path))
    description = json.loads(arrays["description"].tobytes()) | changes
    arrays["description"] = np.frombuffer(json.dumps(description).encode(), np.uint8)
    np.savez(path, **arrays)


def test_a_file_that_is_no_such_state_is_refused(tmp_path):
    path = tmp_path / "state.npz"
    save_state(path, MODEL.init_state(2, capacity=9))
    good = path.read_bytes()

    def message(model=MODEL, file=path):
        with pytest.raises(StateFileError) as error:
            load_state(file, model)
        return str(error.value)

    assert "does not exist" in message(file=tmp_path / "none.npz")
    path.write_bytes(good[: len(good) // 2])
    assert "damaged" in message()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    path.write_bytes(bytes(flipped))
    assert "damaged" in message()
    path.write_text("text")
    assert "not a state file" in message()
    path.write_bytes(good)
    _rewrite(path, version=2)
    assert "version 2, but this library reads 'nha_jax state', version 1" in message()
    path.write_bytes(good)
    for change, sentence in (
        ({"num_layers": 2, "windows": "3"}, "4 layers, but this one has 2"),
        ({"num_slots": 5}, "of another model"),
        ({"conv_width": 0}, "it has"),
        ({"conv_width": 4}, "of another model"),
        ({"dtype": "bfloat16"}, "is float32 of shape"),
    ):
        other = NHALanguageModel(dataclasses.replace(MIXED, **change))
        assert sentence in message(other), change


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: select_sequences(s, np.array([0, 2])), "rows has 2, but must be from 0 to 1"),
        (lambda s: select_sequences(s, np.array([0.5])), "rows must be a vector of integers"),
        (lambda s: replace_sequences(s, np.array([1, 1]), s), "must name each sequence once"),
        (
            lambda s: replace_sequences(s, np.array([0, 1]), MODEL.init_state(2, windows="3")),
            "other is a state for the windows (3, 3, 3, 3)",
        ),
        (
            lambda s: replace_sequences(s, np.array([0, 1]), MODEL.init_state(2, capacity=8)),
            "other holds an array of shape (2, 8, 2, 4)",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(MODEL.init_state(2, capacity=9))
