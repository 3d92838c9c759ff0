"""Each filter against its definition in NumPy; a sequence's draws are its own."""

import re

import jax
import numpy as np
import pytest

from nha_jax.inference.sampling import (
    GREEDY,
    Sampling,
    SamplingArrays,
    choose_tokens,
    filter_logits,
)

VOCABULARY = 40


def _logits(rows, seed=0):
    logits = np.random.default_rng(seed).normal(size=(rows, VOCABULARY)).astype(np.float32)
    logits[:, 7] = logits[:, 3]  # a tie
    return 2 * logits


def _kept(logits, setting):
    """What stays of one row, by the words of `Sampling`."""
    order = sorted(range(VOCABULARY), key=lambda token: (-logits[token], token))
    kept = order[: setting.top_k or VOCABULARY]
    weights = np.exp(logits[kept].astype(np.float64))
    share = weights / weights.sum()
    count = int(np.searchsorted(np.cumsum(share), setting.top_p) + 1)
    kept = kept[:count]
    return {
        token for token in kept if logits[token] >= logits.max() + np.log(setting.min_p or 1e-99)
    }


SETTINGS = [
    Sampling(),
    Sampling(top_k=1),
    Sampling(top_k=4),
    Sampling(top_p=0.6),
    Sampling(top_p=1e-6),
    Sampling(min_p=0.2),
    Sampling(min_p=1.0),
    Sampling(top_k=10, top_p=0.7, min_p=0.05),
    Sampling(top_k=1000),
]


def test_filters_keep_what_they_say_side_by_side():
    logits = _logits(len(SETTINGS))
    found = np.asarray(jax.jit(filter_logits)(logits, SamplingArrays.of(SETTINGS)))
    for row, setting in enumerate(SETTINGS):
        kept = set(np.flatnonzero(np.isfinite(found[row])).tolist())
        assert kept == _kept(logits[row], setting), setting
        np.testing.assert_array_equal(found[row, sorted(kept)], logits[row, sorted(kept)])


def _choose(logits, settings, number=0, seen=None):
    numbers = np.full(len(settings), number, np.int32)
    if seen is None:
        seen = np.zeros(logits.shape, bool)
    return jax.jit(choose_tokens)(logits, SamplingArrays.of(settings), numbers, seen)


def test_greedy_takes_the_likeliest_and_tells_its_probability():
    logits = _logits(3)
    tokens, found = _choose(logits, [GREEDY] * 3)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))
    wide = logits.astype(np.float64)
    expected = wide.max(axis=-1) - np.log(np.exp(wide).sum(axis=-1))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_sequence_draws_the_same_alone_in_any_row_and_with_any_mates():
    logits = _logits(5)
    mates = [GREEDY, Sampling(top_k=3, seed=8), Sampling(seed=9), Sampling(top_p=0.5)]
    mine = Sampling(temperature=1.3, seed=5)
    alone = [int(_choose(logits[:1], [mine], number)[0][0]) for number in range(20)]
    assert len(set(alone)) > 3
    for row in (0, 2, 4):
        rows = np.roll(logits, row, axis=0)
        settings = [*mates[:row], mine, *mates[row:]]
        tokens = [int(_choose(rows, settings, number)[0][row]) for number in range(20)]
        assert tokens == alone
    other_seed = [
        int(_choose(logits[:1], [Sampling(temperature=1.3, seed=6)], n)[0][0]) for n in range(20)
    ]
    assert other_seed != alone


def test_draws_follow_the_softmax_at_the_temperature():
    draws, temperature = 4000, 1.7
    logits = np.broadcast_to(_logits(1), (draws, VOCABULARY))
    settings = [Sampling(temperature=temperature, seed=seed) for seed in range(draws)]
    tokens, _ = _choose(logits, settings)
    found = np.bincount(tokens, minlength=VOCABULARY) / draws
    weights = np.exp(logits[0].astype(np.float64) / temperature)
    expected = weights / weights.sum()
    # Five standard deviations of each share.
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected / draws) + 1e-3)


def test_the_penalty_is_on_tokens_seen_of_its_own_sequence():
    logits = np.zeros((2, VOCABULARY), np.float32)
    logits[:, 3], logits[:, 5], logits[:, 9] = 3.0, 2.5, -1.0
    logits[:, 10:] = -1.5
    seen = np.zeros((2, VOCABULARY), bool)
    seen[0, 3] = True
    settings = [Sampling(temperature=0.0, repetition_penalty=1.3)] * 2
    tokens, found = _choose(logits, settings, seen=seen)
    np.testing.assert_array_equal(tokens, [5, 3])
    # The probability told is the model's own.
    np.testing.assert_allclose(found[0] - found[1], -0.5, atol=1e-6)
    # A negative logit is multiplied: nothing gets likelier by having been seen.
    negative = -np.ones((1, VOCABULARY), np.float32)
    negative[0, 4] = -0.9
    seen = np.zeros((1, VOCABULARY), bool)
    seen[0, 4] = True
    tokens, _ = _choose(negative, settings[:1], seen=seen)
    assert tokens[0] != 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1, but must be a number from 0."),
        ("temperature", float("nan"), "temperature is nan"),
        ("top_p", 0, "top_p is 0, but must be a number above 0 and at most 1."),
        ("min_p", 1.5, "min_p is 1.5, but must be a number from 0 to 1."),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0, but must be a number above 0."),
        ("top_k", 0, "top_k is 0, but must be None or an integer from 1."),
        ("top_k", True, "top_k is True"),
        ("seed", -1, "seed is -1, but must be an integer from 0 to 2**32 - 1."),
        ("seed", 1.5, "seed is 1.5"),
    ],
)
def test_bad_settings_are_refused(field, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(**{field: value})
