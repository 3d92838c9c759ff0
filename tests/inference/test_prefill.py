"""Prefill in chunks and then steps is one whole pass, for every window, split and padding."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.inference.decode import append
from nha_jax.inference.prefill import pad_prompts, prefill, prefill_chunk
from tests.inference.small import MIXED, MODEL, params_of, prompts_of, relative_error

LENGTHS = [90, 1, 37]
STEPS = 12
CAPACITY = 128


@pytest.fixture(scope="module")
def whole():
    """Logits after every token of each sequence, prompt and what follows, from one pass."""
    sequences = prompts_of([length + STEPS for length in LENGTHS])
    tokens, segment_ids = pad_prompts(sequences)
    apply = jax.jit(lambda p, t, ids: MODEL.apply({"params": p}, t, segment_ids=ids))
    logits = np.asarray(apply(params_of(MIXED), tokens, segment_ids))
    return sequences, [logits[row, : len(ids)] for row, ids in enumerate(sequences)]


def _padded(prompts, side):
    longest = max(map(len, prompts)) + (1 if side == "both" else 0)
    tokens = np.full((len(prompts), longest), 10**6)  # whatever stands there is not looked at
    ids = np.zeros(tokens.shape, np.int32)
    for row, prompt in enumerate(prompts):
        start = {"left": longest - len(prompt), "right": 0, "both": (longest - len(prompt)) // 2}
        place = slice(start[side], start[side] + len(prompt))
        tokens[row, place], ids[row, place] = prompt, 7
    return tokens, ids


@pytest.fixture(scope="module")
def step():
    return jax.jit(lambda p, t, s: MODEL.apply({"params": p}, t, state=s, return_state=True))


@pytest.mark.parametrize(("side", "chunk"), [("left", 16), ("right", 7), ("both", 1)])
def test_prefill_then_steps_is_one_whole_pass(whole, step, side, chunk):
    sequences, expected = whole
    prompts = [ids[:length] for ids, length in zip(sequences, LENGTHS, strict=True)]
    tokens, segment_ids = _padded(prompts, side)
    params = params_of(MIXED)
    logits, state = prefill(
        MODEL, params, tokens, segment_ids=segment_ids, capacity=CAPACITY, chunk=chunk
    )
    for row, length in enumerate(LENGTHS):
        assert relative_error(logits[row], expected[row][length - 1]) < 1e-5
    np.testing.assert_array_equal(state.length, LENGTHS)
    for number in range(STEPS):
        token = [[ids[length + number]] for ids, length in zip(sequences, LENGTHS, strict=True)]
        logits, state = step(params, jnp.asarray(token, jnp.int32), state)
        for row, length in enumerate(LENGTHS):
            assert relative_error(logits[row, 0], expected[row][length + number]) < 1e-5


def test_a_state_goes_on_and_is_not_changed(whole):
    """A second prompt, and single tokens by `append`, continue where the first one ended."""
    sequences, expected = whole
    params = params_of(MIXED)
    first, ids = pad_prompts([sequences[0][:20], sequences[1][:2], sequences[2][:9]])
    _, state = prefill(MODEL, params, first, segment_ids=ids, capacity=CAPACITY, chunk=16)
    before = jax.tree.map(np.array, state)
    copied = jax.tree.map(jnp.copy, state)
    token = jnp.asarray([sequences[0][20], sequences[1][2], sequences[2][9]])
    on = append(MODEL, params, copied, token)
    second, ids = pad_prompts([sequences[0][21:70], sequences[1][3:5], sequences[2][10:49]])
    logits, _ = prefill(MODEL, params, second, segment_ids=ids, state=on, chunk=16)
    for row, last in enumerate((69, 4, 48)):
        assert relative_error(logits[row], expected[row][last]) < 1e-5
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_one_program_serves_all_prompts_of_a_chunk_size():
    params = params_of(MIXED)
    sizes = []
    for lengths in ([5, 3, 1], [70, 2, 33], [16, 16, 16]):
        tokens, ids = pad_prompts(prompts_of(lengths))
        prefill(MODEL, params, tokens, segment_ids=ids, capacity=CAPACITY, chunk=16)
        sizes.append(prefill_chunk._cache_size())
    assert sizes[0] == sizes[-1]


@pytest.mark.parametrize(
    ("tokens", "call", "message"),
    [
        ([[1, 2]], {"segment_ids": [[0, 0]]}, "prompt 0 is empty"),
        ([[1, 2, 3]], {"segment_ids": [[1, 0, 1]]}, "segment_ids of prompt 0 must be one run"),
        ([[1, 2, 3]], {"segment_ids": [[1, 2, 2]]}, "segment_ids of prompt 0 must be one run"),
        ([[1, 2]], {"segment_ids": [[1]]}, "segment_ids has shape (1, 1)"),
        ([[1.0]], {}, "must be integers [B, P]"),
        ([[1, 2, 3]], {"capacity": 2}, "holds at most 2 tokens"),
        ([[1, 2, 3]], {"chunk": 0}, "chunk is 0"),
    ],
)
def test_bad_prompts_are_refused(tokens, call, message):
    call = {name: np.asarray(x) if name == "segment_ids" else x for name, x in call.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        prefill(MODEL, params_of(MIXED), np.asarray(tokens), **call)


def test_a_batch_needs_prompts():
    with pytest.raises(ValueError, match="at least one prompt"):
        pad_prompts([])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        pad_prompts([[1], []])
