"""A prompt gives the same text alone, among others, and after others in the same place."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nha_jax.data.tokenizers import BytesTokenizer
from nha_jax.inference import engine as engine_module
from nha_jax.inference.decode import decode
from nha_jax.inference.engine import Engine
from nha_jax.inference.generate import Generation, generate
from nha_jax.inference.sampling import GREEDY, Sampling
from nha_jax.models.language_model import NHALanguageModel
from tests.inference.small import params_of, prompts_of
from tests.inference.test_generate import CONFIG

MODEL = NHALanguageModel(CONFIG)
BYTES = BytesTokenizer()
LIMITS: dict[str, Any] = {
    "num_sequences": 3,
    "max_prompt": 40,
    "max_output": 24,
    "prefill_chunk": 8,
    "prefill_sequences": 2,
    "steps": 4,
}
PROMPTS = prompts_of([5, 33, 1, 8, 17, 40, 2, 9, 16, 3], vocab_size=256)
SETTINGS = [
    GREEDY,
    Sampling(seed=1, top_k=30),
    GREEDY,
    Sampling(seed=2, repetition_penalty=1.3),
    *[GREEDY] * 6,
]
OUTPUTS = [24, 3, 11, 24, 1, 7, 24, 2, 16, 5]


@pytest.fixture(scope="module")
def params() -> Any:
    return params_of(CONFIG)


def _engine(params: Any, **changes: Any) -> Engine:
    return Engine(MODEL, params, **(LIMITS | changes))


@pytest.fixture(scope="module")
def alone(params: Any) -> list[Generation]:
    """Each prompt by itself in an engine that has nothing else to do."""
    results = []
    engine = _engine(params)
    for prompt, setting, tokens in zip(PROMPTS, SETTINGS, OUTPUTS, strict=True):
        engine.submit(prompt, sampling=setting, max_tokens=tokens)
        ((_, generation),) = engine.run()
        results.append(generation)
    return results


def test_alone_is_what_generate_gives(params, alone):
    rows = [0, 2, 7]
    found = generate(MODEL, params, [PROMPTS[row] for row in rows], max_tokens=24)
    for row, many in zip(rows, found, strict=True):
        assert alone[row].tokens == many.tokens[: OUTPUTS[row]]
        assert alone[row].finish_reason == "length"
    assert len({token for generation in alone for token in generation.tokens}) > 30


def test_a_prompt_gives_the_same_text_alone_and_among_others(params, alone):
    engine = _engine(params)
    numbers = [
        engine.submit(prompt, sampling=setting, max_tokens=tokens)
        for prompt, setting, tokens in zip(PROMPTS, SETTINGS, OUTPUTS, strict=True)
    ]
    programs = None
    found = {}
    most = 0
    while engine.busy:
        for number, generation in engine.step():
            assert number not in found
            found[number] = generation
        most = max(most, engine.generating)
        sizes = (decode._cache_size(), engine_module._place_sequence._cache_size())
        programs = programs or (sizes if engine.generating else None)
        assert programs in (None, sizes), "something was compiled again"
    assert most == 3
    assert [found[number].tokens for number in numbers] == [one.tokens for one in alone]
    # Not in the order of the queue: places are taken as they get free.
    assert list(found) != numbers
    assert not engine.busy


def test_nothing_is_read_of_what_a_place_held_before(params, alone):
    engine = _engine(params)

    def poisoned(leaf: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.full_like(leaf, jnp.nan if is_float else 5)

    engine._reading_state = jax.tree.map(poisoned, engine._reading_state)
    engine._reading_logits = poisoned(engine._reading_logits)
    state = jax.tree.map(poisoned, engine._sequences.state)
    engine._sequences = dataclasses.replace(engine._sequences, state=state)
    numbers = [
        engine.submit(prompt, max_tokens=tokens)
        for prompt, tokens in zip(PROMPTS[:3:2], OUTPUTS[:3:2], strict=True)
    ]
    found = dict(engine.run())
    assert [found[number].tokens for number in numbers] == [alone[0].tokens, alone[2].tokens]


def test_cancelled_wherever_it_is(params, alone):
    engine = _engine(params)
    generating = engine.submit(PROMPTS[0])
    engine.step()
    reading, read_on, waiting = (
        engine.submit(PROMPTS[row], max_tokens=OUTPUTS[row], sampling=SETTINGS[row])
        for row in (5, 1, 2)
    )
    engine.step()
    assert (engine.generating, engine.waiting) == (1, 1)
    assert [engine.cancel(number) for number in (waiting, reading, generating)] == [True] * 3
    assert (engine.generating, engine.waiting) == (0, 0)
    last = engine.submit(PROMPTS[2], max_tokens=OUTPUTS[2])
    found = dict(engine.run())
    assert {number: generation.finish_reason for number, generation in found.items()} == {
        generating: "cancelled",
        reading: "cancelled",
        waiting: "cancelled",
        read_on: "length",
        last: "length",
    }
    tokens = found[generating].tokens
    assert 0 < len(tokens) < 24
    assert tokens == alone[0].tokens[: len(tokens)]
    assert found[reading].tokens == found[waiting].tokens == []
    assert found[read_on].tokens == alone[1].tokens
    assert found[last].tokens == alone[2].tokens
    assert not engine.cancel(last)


def test_stop_strings_end_tokens_and_streams_of_their_own(params):
    engine = _engine(params, tokenizer=BYTES)
    numbers = [engine.submit(text) for text in ("one", "another", "x")]
    whole = dict(engine.run())
    texts = [whole[number].text for number in numbers]
    stop = texts[1][3:5]
    streamed: dict[int, str] = {}

    def listen(number: int, tokens: list[int], text: str) -> None:
        streamed[number] = streamed.get(number, "") + text

    numbers = [
        engine.submit("one", on_tokens=listen),
        engine.submit("another", stop=[stop], on_tokens=listen),
        engine.submit("x", on_tokens=listen),
    ]
    found = dict(engine.run())
    assert found[numbers[1]].text == texts[1].partition(stop)[0]
    assert found[numbers[1]].finish_reason == "stop"
    assert [found[numbers[row]].text for row in (0, 2)] == [texts[0], texts[2]]
    assert streamed == {number: found[number].text for number in numbers}
    end = whole[0].tokens[6]
    ending = _engine(params, end_ids=[end])
    number = ending.submit([BYTES.bos_id, *BYTES.encode("one")])
    ended = dict(ending.run())[number]
    assert ended.finish_reason == "end"
    assert ended.tokens == whole[0].tokens[: whole[0].tokens.index(end) + 1]


@pytest.mark.parametrize(
    ("prompt", "call", "message"),
    [
        ([], {}, "The prompt is empty"),
        ([1] * 41, {}, "The prompt has 41 tokens, but the engine takes at most 40"),
        ([1], {"max_tokens": 25}, "max_tokens is 25, but must be from 1 to 24"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([999], {}, "the id 999"),
        ("text", {}, "needs tokenizer"),
        ([1], {"stop": ["a"]}, "stop needs a tokenizer"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(params, prompt, call, message):
    engine = _engine(params)
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.submit(prompt, **call)
    assert not engine.busy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_sequences": 0}, "num_sequences is 0, but must be 1 or more."),
        ({"steps": 17}, "steps is 17, but must be from 1 to 16."),
        ({"windows": "x"}, "A window is 'x'"),
    ],
)
def test_bad_limits_are_refused(params, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _engine(params, **change)
