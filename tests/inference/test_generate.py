"""Generation is what one whole pass after the other gives, for every prompt by itself."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nha_jax
from nha_jax.data.tokenizers import BytesTokenizer
from nha_jax.inference.decode import decode
from nha_jax.inference.generate import generate
from nha_jax.inference.params import cast_params
from nha_jax.inference.prefill import pad_prompts
from nha_jax.inference.sampling import GREEDY, Sampling
from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import NHALanguageModel
from tests.inference.small import params_of, prompts_of

CONFIG = NHAConfig(
    vocab_size=259,
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    key_width=8,
    feed_forward_width=24,
    num_slots=4,
    windows="4,full@1",
    conv_width=2,
    # A tied head with random weights would repeat the last token.
    tie_embeddings=False,
    dtype="float32",
)
MODEL = NHALanguageModel(CONFIG)
BYTES = BytesTokenizer()
PROMPTS = prompts_of([7, 1, 14], vocab_size=256)
TOKENS = 19
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.2, seed=4)


@pytest.fixture(scope="module")
def params() -> Any:
    return params_of(CONFIG)


@pytest.fixture(scope="module")
def greedy(params: Any) -> list[nha_jax.Generation]:
    return generate(MODEL, params, PROMPTS, max_tokens=TOKENS, sampling=GREEDY)


def test_greedy_is_the_likeliest_token_of_whole_passes(params, greedy):
    sequences = [p + g.tokens for p, g in zip(PROMPTS, greedy, strict=True)]
    tokens, segment_ids = pad_prompts(sequences)
    logits = jax.jit(lambda p, t, ids: MODEL.apply({"params": p}, t, segment_ids=ids))(
        params, tokens, segment_ids
    )
    log_probabilities = np.asarray(jax.nn.log_softmax(logits))
    for row, (prompt, generation) in enumerate(zip(PROMPTS, greedy, strict=True)):
        places = np.arange(len(prompt) - 1, len(sequences[row]) - 1)
        assert generation.tokens == log_probabilities[row, places].argmax(axis=-1).tolist()
        np.testing.assert_allclose(
            generation.log_probabilities,
            log_probabilities[row, places, generation.tokens],
            rtol=1e-4,
            atol=1e-5,
        )
        assert generation.finish_reason == "length"
        assert generation.text is None
    assert len({token for g in greedy for token in g.tokens}) > 10


def test_a_sequence_does_not_depend_on_its_mates_or_its_place(params, greedy):
    settings = [SAMPLED, GREEDY, Sampling(seed=1, min_p=0.01)]
    mixed = generate(MODEL, params, PROMPTS, max_tokens=TOKENS, sampling=settings)
    turned = generate(MODEL, params, PROMPTS[::-1], max_tokens=TOKENS, sampling=settings[::-1])
    assert [g.tokens for g in mixed] == [g.tokens for g in turned[::-1]]
    assert mixed[1].tokens == greedy[1].tokens
    assert mixed[0].tokens != greedy[0].tokens
    others = [*prompts_of([3, 11], seed=5, vocab_size=256), PROMPTS[0]]
    among_others = generate(
        MODEL, params, others, max_tokens=TOKENS, sampling=[GREEDY, GREEDY, SAMPLED]
    )
    assert among_others[2].tokens == mixed[0].tokens


def test_end_tokens_end_a_sequence_and_no_other(params, greedy):
    ends = [greedy[0].tokens[5], greedy[2].tokens[9]]
    found = generate(
        MODEL, params, PROMPTS, max_tokens=TOKENS, sampling=GREEDY, end_ids=ends, tokenizer=BYTES
    )
    for generation, whole in zip(found, greedy, strict=True):
        places = [place for place, token in enumerate(whole.tokens) if token in ends]
        expected = whole.tokens[: places[0] + 1] if places else whole.tokens
        assert generation.tokens == expected
        assert len(generation.log_probabilities) == len(expected)
        assert generation.finish_reason == ("end" if places else "length")
        assert generation.text == BYTES.decode(expected[:-1] if places else expected)
    assert len(found[0].tokens) == 6 or greedy[0].tokens.index(ends[0]) < 5


def test_a_stop_string_ends_the_text_and_the_stream_tells_it_all(params):
    prompts = ["one", "another one", "x"]
    call: dict[str, Any] = {"max_tokens": TOKENS, "sampling": GREEDY, "tokenizer": BYTES}
    whole = generate(MODEL, params, prompts, **call)
    stop = whole[1].text[4:6]
    streamed: dict[int, tuple[list[int], str]] = {row: ([], "") for row in range(3)}

    def listen(row: int, tokens: list[int], text: str) -> None:
        streamed[row] = (streamed[row][0] + tokens, streamed[row][1] + text)

    found = generate(MODEL, params, prompts, stop=["never", stop], on_tokens=listen, **call)
    for row, generation in enumerate(found):
        assert streamed[row] == (generation.tokens, generation.text)
        text, cut, _ = whole[row].text.partition(stop)
        assert generation.text == text
        assert generation.finish_reason == ("stop" if cut else whole[row].finish_reason)
    assert found[1].finish_reason == "stop"


@pytest.mark.parametrize("stop", [(), ("stop",)])
def test_a_returned_state_goes_on_where_the_text_ended(params, stop):
    """Two turns with the state are one with everything in the prompt."""
    call: dict[str, Any] = {"sampling": GREEDY, "tokenizer": BYTES, "end_ids": ()}
    first, state = generate(
        MODEL, params, ["a", "ab", "Abc"], max_tokens=6, return_state=True, stop=stop, **call
    )
    before = jax.tree.map(np.array, state)
    turn = [[9, 9], [5, 6, 7], [8]]
    second = generate(MODEL, params, turn, max_tokens=9, state=state, **call)
    whole = [
        [BYTES.bos_id, *BYTES.encode(text), *generation.tokens, *ids]
        for text, generation, ids in zip(("a", "ab", "Abc"), first, turn, strict=True)
    ]
    expected = generate(MODEL, params, whole, max_tokens=9, **call)
    assert [g.tokens for g in second] == [g.tokens for g in expected]
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_a_state_after_a_stop_string_has_no_more_than_the_text(params):
    call: dict[str, Any] = {"max_tokens": TOKENS, "sampling": GREEDY, "tokenizer": BYTES}
    prompts = ["one", "another", "x"]
    whole = generate(MODEL, params, prompts, **call)
    stop = [whole[0].text[3:5]]
    found, state = generate(MODEL, params, prompts, stop=stop, return_state=True, **call)
    assert found[0].finish_reason == "stop"
    assert state.length.tolist() == [
        1 + len(prompt) + len(generation.tokens)
        for prompt, generation in zip(prompts, found, strict=True)
    ]


def test_other_windows_and_one_program_for_lengths_alike(params):
    full = generate(MODEL, params, PROMPTS, max_tokens=TOKENS, sampling=GREEDY, windows="full")
    programs = decode._cache_size()
    longer = prompts_of([8, 2, 16], vocab_size=256)
    other = generate(MODEL, params, longer, max_tokens=TOKENS, sampling=GREEDY, windows="full")
    assert decode._cache_size() == programs
    assert [g.tokens for g in full] != [g.tokens for g in other]
    hybrid = generate(MODEL, params, PROMPTS, max_tokens=TOKENS, sampling=GREEDY)
    assert [g.tokens for g in full] != [g.tokens for g in hybrid]


def test_cast_parameters_give_the_same_logits_bit_for_bit(params):
    config = NHAConfig.from_dict(
        CONFIG.to_dict()
        | {"num_layers": 1, "windows": "4"}
        | {"dtype": "bfloat16", "qkv_bias": True, "gate_bias": True, "qk_norm": True}
    )
    wide = params_of(config)
    cast = cast_params(wide, config)
    apply = jax.jit(lambda p, t: NHALanguageModel(config).apply({"params": p}, t))
    tokens = jnp.asarray(prompts_of([30, 30], vocab_size=256))
    np.testing.assert_array_equal(apply(wide, tokens), apply(cast, tokens))
    halved = sum(leaf.nbytes for leaf in jax.tree.leaves(cast))
    assert halved < 0.55 * sum(leaf.nbytes for leaf in jax.tree.leaves(wide))


@pytest.mark.parametrize(
    ("prompts", "call", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([""], {"tokenizer": BYTES}, "a prompt is empty text"),
        (["a"], {}, "which needs tokenizer"),
        ([[1, 259]], {}, "prompt 0 has the id 259, but the model's ids are from 0 to 258"),
        ([[1]], {"max_tokens": 0}, "max_tokens is 0"),
        ([[1]], {"stop": ["a"]}, "stop needs tokenizer"),
        ([[1]], {"stop": [""], "tokenizer": BYTES}, "an empty string"),
        ([[1]], {"sampling": [GREEDY] * 2}, "sampling has 2 entries for 1 prompts"),
        ([[1] * 6], {"capacity": 10}, "come to 11 tokens, but a layer of full attention holds"),
        ([[1]], {"windows": "4,full@2"}, "'2' is not a layer"),
        ([[1]], {"state": MODEL.init_state(2, capacity=9)}, "state has 2 sequences"),
        ([[1]], {"state": MODEL.init_state(1, capacity=5)}, "come to 6 tokens"),
        ([[1]], {"state": MODEL.init_state(1, capacity=5), "capacity": 9}, "belong to state"),
    ],
)
def test_bad_arguments_are_refused(params, prompts, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(MODEL, params, prompts, **{"max_tokens": 5, **call})
