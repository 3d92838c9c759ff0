"""The search finds what is best within the budget, whatever the scores; costs are counted."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from nha_jax.inference.cost import decode_cost
from nha_jax.inference.recall import make_recall_step, make_recall_task
from nha_jax.inference.search import Evaluated, best, pareto_front, search_windows
from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import NHALanguageModel
from nha_jax.ops.windows import windows_array
from tests.inference.small import MIXED, params_of

CHOICES = (None, 16, 64)


def _cost(setting):
    return sum({16: 1, 64: 3, None: 10}[window] for window in setting)


def _score(setting):
    """Full attention in layer 2 is worth most, 64 in layer 0 something."""
    worth = 5 * (setting[2] is None) + 2 * (setting[0] != 16) + 0.1 * (setting[1] is None)
    return (10 - worth,)


@pytest.mark.parametrize("budget", [3, 12, 14, 23, 100])
def test_few_settings_are_all_tried(budget):
    calls = []

    def evaluate(setting):
        calls.append(setting)
        return _score(setting)

    found = search_windows(3, CHOICES, evaluate, _cost, budget)
    expected = {s for s in itertools.product(CHOICES, repeat=3) if _cost(s) <= budget}
    assert set(calls) == expected
    assert len(calls) == len(expected) == len(found)
    chosen = best(found)
    assert chosen.score == min(map(_score, expected))
    assert chosen.cost == min(_cost(s) for s in expected if _score(s) == chosen.score)


@pytest.mark.parametrize("beam", [1, 3])
def test_insertion_finds_layers_that_are_worth_it_by_themselves(beam):
    layers, calls = 12, []

    def evaluate(setting):
        calls.append(setting)
        return _score(setting)

    found = search_windows(layers, CHOICES, evaluate, _cost, 12 + 9 + 2, beam=beam)
    assert best(found).windows == (64, 16, None, *[16] * 9)
    assert len(calls) == len(set(calls)) < 400 * beam
    assert max(one.cost for one in found) <= 23


def test_a_beam_finds_a_pair_that_greedy_insertion_misses():
    """Layers 1 and 2 are worth much together and nothing alone; layer 0 a little by itself."""

    def evaluate(setting):
        full = [window is None for window in setting]
        return (3 - full[0] * 1.0 - full[1] * full[2] * 2.5 - 0.1 * full[1],)

    def cost(setting):
        return sum(window is None for window in setting)

    call = (6, (8, None), evaluate, cost, 2)
    greedy = best(search_windows(*call, max_exhaustive=1))
    wide = best(search_windows(*call, max_exhaustive=1, beam=2))
    assert greedy.windows[:3] == (None, None, 8)
    assert wide.windows[:3] == (8, None, None)


def test_front_and_refusals():
    def one(cost, *score):
        return Evaluated((cost,), cost, score)

    evaluated = [one(3, 5.0), one(1, 9.0), one(2, 9.0), one(4, 5.0), one(5, 1.0), one(3, 6.0)]
    assert [one.cost for one in pareto_front(evaluated)] == [1, 3, 5]
    with pytest.raises(ValueError, match="The budget 2 is less than what the cheapest"):
        search_windows(3, CHOICES, _score, _cost, 2)
    with pytest.raises(ValueError, match="choices is empty"):
        search_windows(3, (), _score, _cost, 2)


def test_costs_are_those_counted_by_hand():
    config = NHAConfig(
        vocab_size=10,
        num_layers=3,
        width=4,
        num_heads=4,
        num_kv_heads=2,
        key_width=2,
        value_width=6,
        feed_forward_width=3,
        num_slots=5,
        dtype="bfloat16",
    )
    windows, context = (None, 8, 500), 100
    found = decode_cost(config, windows, context)
    rows, slots = 100 + 8 + 100, 5  # the window of 500 tokens is not full: no slot is in use
    assert found.state_bytes == rows * 2 * 8 * 2 + 2 * slots * 2 * 8 * 4
    assert found.flops - found.weight_bytes == 2 * 4 * (rows + slots) * 8 + 3 * 2 * slots * 8
    longer = decode_cost(config, windows, 10_000)
    assert longer.state_bytes - found.state_bytes > (10_000 - 100) * 2 * 8 * 2
    windowed = [decode_cost(config, (8, 8, 500), n).state_bytes for n in (1000, 100_000)]
    assert windowed[0] == windowed[1]


def test_recall_is_right_where_the_answer_is_and_one_program_serves_all_windows():
    task = make_recall_task(np.arange(3, 29), 1, rows=4, pairs=6)
    for row in range(4):
        tokens = np.asarray(task.tokens[row]).tolist()
        assert tokens[0] == 1
        stated = dict(zip(tokens[1:13:2], tokens[2:13:2], strict=True))
        assert len(stated) == 6
        for place, answer in zip(task.places[row].tolist(), task.answers[row], strict=True):
            assert stated[tokens[place]] == answer == tokens[place + 1]
    model = NHALanguageModel(dataclasses.replace(MIXED, num_layers=2, windows="3"))
    params, step = params_of(model.config), jax.jit(make_recall_step(model))
    whole = jax.jit(lambda p, t, w: model.apply({"params": p}, t, windows=w))
    found = []
    for windows in map(windows_array, ((3, 3), (None, 0), (None, None))):
        metrics = step(params, task, windows)
        logits = np.asarray(whole(params, task.tokens, windows))
        places = np.asarray(task.places)
        picked = np.take_along_axis(logits, places[..., None], axis=1)
        assert metrics["accuracy"] == np.mean(picked.argmax(axis=-1) == task.answers)
        log_probabilities = np.asarray(jax.nn.log_softmax(picked))
        told = np.take_along_axis(log_probabilities, np.asarray(task.answers)[..., None], axis=-1)
        np.testing.assert_allclose(metrics["nats"], -told.mean(), rtol=1e-4)
        found.append(float(metrics["nats"]))
    assert step._cache_size() == 1
    assert len(set(found)) == 3
    with pytest.raises(ValueError, match="pairs is 27, but must be from 1 to 26"):
        make_recall_task(np.arange(3, 29), 1, rows=1, pairs=27)
