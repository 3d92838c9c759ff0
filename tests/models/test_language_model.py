"""`NHALanguageModel`: the ways to run its layers agree, and so do all ways to cut up its input."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import NHALanguageModel, count_parameters
from nha_jax.ops.windows import FULL, windows_array

CONFIG = NHAConfig(
    vocab_size=23,
    num_layers=4,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    key_width=4,
    value_width=6,
    feed_forward_width=24,
    num_slots=3,
    windows="3",
    dtype="float32",
)
MIXED = dataclasses.replace(
    CONFIG, windows=(0, 8, 64, None), conv_width=3, qk_norm=True, output_norm=True, qkv_bias=True
)
# Compiling is most of what these tests take, and this halves it. The same program is compiled for
# speed where the implementations of the operator are compared.
_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


def _variables(config, seed=0):
    """Random parameters, norm scales and biases included, large enough for peaked softmaxes."""
    model = NHALanguageModel(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.4, jnp.float32), nn.meta.unbox(shapes)
    )


def _tokens(batch, length, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, CONFIG.vocab_size, size=(batch, length)).astype(np.int32)


def _error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def _assert_gradients_agree(a, b, tolerance):
    errors = jax.tree.map(_error, a, b)
    assert max(jax.tree.leaves(errors)) < tolerance, errors


def _loss(model, variables, tokens, **call):
    """Mean surprise of the next token, and the statistics."""
    returned = model.apply(variables, tokens, return_statistics=True, **call)
    logits = jax.nn.log_softmax(returned[0][:, :-1])
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked), returned[-1]


def test_static_windows_windows_as_data_and_state_agree():
    """Seven layers: a block (3, 3, full) twice and a run; scans of every kind, rematerialised."""
    config = dataclasses.replace(CONFIG, num_layers=7, windows="3,full@2,5")
    tokens, variables = _tokens(2, 11), _variables(config)
    model = NHALanguageModel(dataclasses.replace(config, remat="full"))
    plain = NHALanguageModel(config)
    calls = {
        "static": (model, {}),
        "data": (plain, {"windows": windows_array(config.layer_windows)}),
        "state": (plain, {"state": model.init_state(2, capacity=11), "return_state": True}),
    }
    results = {
        name: _jit(jax.value_and_grad(lambda v, t, m=m, c=c: _loss(m, v, t, **c), has_aux=True))(
            variables, tokens
        )
        for name, (m, c) in calls.items()
    }
    (loss, statistics), gradients = results["static"]
    assert statistics["slot_share"].shape == (7,)
    # Full layers (2 and 5) never read slots, the others do.
    assert np.array_equal(statistics["slot_share"] > 0, np.arange(7) % 3 != 2)
    for name in ("data", "state"):
        (other_loss, other_statistics), other_gradients = results[name]
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        for key, value in statistics.items():
            np.testing.assert_allclose(other_statistics[key], value, atol=1e-5)
        _assert_gradients_agree(other_gradients, gradients, 1e-4)


def test_parameters_do_not_depend_on_windows():
    tokens = jnp.zeros((1, 2), jnp.int32)
    trees = []
    for windows in ("3", "0,full@1,3", (0, 8, 64, None), "full"):
        model = NHALanguageModel(dataclasses.replace(CONFIG, windows=windows))
        trees.append(_jit(model.init)(jax.random.key(7), tokens))
    for tree in trees[1:]:
        assert jax.tree.structure(tree) == jax.tree.structure(trees[0])
        jax.tree.map(np.testing.assert_array_equal, tree, trees[0])


def test_one_compilation_serves_all_windows():
    model, variables, tokens = NHALanguageModel(CONFIG), _variables(CONFIG), _tokens(2, 11)
    evaluate = _jit(lambda v, t, w: model.apply(v, t, windows=w))
    settings = [[0] * 4, [3] * 4, [5, 0, FULL, 2], [FULL] * 4, [11, 12, 10, 1]]
    logits = [evaluate(variables, tokens, np.array(setting, np.int32)) for setting in settings]
    assert evaluate._cache_size() == 1
    for i, one in enumerate(logits):
        for other in logits[i + 1 :]:
            assert _error(one, other) > 1e-3
    static = _jit(lambda v, t: model.apply(v, t, windows="5,0@1,full@2,2@3"))
    assert _error(static(variables, tokens), logits[2]) < 1e-5


def test_rematerialisation_changes_memory_and_nothing_else():
    """Every policy, with the flag for statistics."""
    tokens = _tokens(2, 32)
    variables = _variables(CONFIG)
    results, memory = {}, {}
    for remat in ("none", "full", "dots", "dots_no_batch"):
        model = NHALanguageModel(dataclasses.replace(CONFIG, remat=remat))
        step = _jit(jax.value_and_grad(lambda v, m=model: _loss(m, v, tokens), has_aux=True))
        compiled = step.lower(variables).compile()
        results[remat] = compiled(variables)
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
    for remat, ((loss, statistics), gradients) in results.items():
        np.testing.assert_allclose(loss, results["none"][0][0], rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            statistics,
            results["none"][0][1],
        )
        _assert_gradients_agree(gradients, results["none"][1], 1e-5)
        assert memory["full"] < memory[remat] or remat == "full"


def test_any_split_of_a_sequence_is_the_whole():
    """Windows 0, 8, 64 and full; prefills of any length, then single tokens."""
    length = 80
    model, variables, tokens = NHALanguageModel(MIXED), _variables(MIXED), _tokens(2, length)
    # Row 0 begins a second document at 30; row 1 ends early.
    ids = np.array([[4] * 30 + [9] * 50, [2] * 75 + [0] * 5], np.int32)
    whole = _jit(lambda v, t: model.apply(v, t, segment_ids=ids))(variables, tokens)
    go_on = _jit(
        lambda v, t, ids, state: model.apply(v, t, segment_ids=ids, state=state, return_state=True)
    )
    for cuts in ([7, 66, 1, 1, 1, 1, 1, 1, 1], [1] * 3 + [7] * 11):
        state = model.init_state(2, capacity=length)
        pieces, start = [], 0
        for size in cuts:
            piece = slice(start, start + size)
            logits, state = go_on(variables, tokens[:, piece], ids[:, piece], state)
            pieces.append(logits)
            start += size
        assert start == length
        logits = np.concatenate(pieces, axis=1)
        assert _error(logits[ids > 0], np.asarray(whole)[ids > 0]) < 1e-5
        np.testing.assert_array_equal(state.length, [50, 75])
        np.testing.assert_array_equal(state.segment_id, [9, 2])


def test_packing_padding_and_batch_mates_do_not_matter():
    """Three documents packed and padded in one row, against each alone in a batch."""
    model, variables = NHALanguageModel(MIXED), _variables(MIXED)
    lengths = (11, 17, 6)
    alone = _tokens(3, 17, seed=1)
    expected = _jit(lambda v, t: model.apply(v, t))(variables, alone)
    documents = [(alone[i, :n], np.asarray(expected)[i, :n]) for i, n in enumerate(lengths)]

    apply = _jit(lambda v, t, ids: model.apply(v, t, segment_ids=ids))
    layouts = [
        [(0, 2), (1, 5), (2, 3)],  # (document, padding before it)
        [(2, 0), (0, 0), (1, 1)],
    ]
    tokens = np.full((2, 46), -1, np.int32)  # padding outside the vocabulary
    ids = np.zeros((2, 46), np.int32)
    where = []
    for row, layout in enumerate(layouts):
        start = 0
        for segment, (document, padding) in enumerate(layout, start=1):
            start += padding
            stop = start + lengths[document]
            tokens[row, start:stop] = documents[document][0]
            ids[row, start:stop] = segment
            where.append((row, slice(start, stop), document))
            start = stop
    logits = np.asarray(apply(variables, tokens, ids))
    assert np.all(np.isfinite(logits))
    for row, piece, document in where:
        assert _error(logits[row, piece], documents[document][1]) < 1e-5


def test_implementations_agree():
    mixed = dataclasses.replace(MIXED, num_layers=3, windows=(0, 5, None))
    tokens = _tokens(2, 21)
    ids = np.array([[1] * 9 + [2] * 12, [0] * 2 + [1] * 14 + [0] * 5], np.int32)
    variables = _variables(mixed)

    def run(implementation):
        model = NHALanguageModel(dataclasses.replace(mixed, implementation=implementation))
        return jax.jit(
            jax.value_and_grad(lambda v: _loss(model, v, tokens, segment_ids=ids), has_aux=True)
        )(variables)

    (loss, statistics), gradients = run("xla")
    (other_loss, other_statistics), other_gradients = run("reference")
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    for key, value in statistics.items():
        np.testing.assert_allclose(value, other_statistics[key], atol=1e-5)
    _assert_gradients_agree(gradients, other_gradients, 1e-4)


def test_bfloat16_computes_low_and_keeps_high():
    config = dataclasses.replace(CONFIG, dtype="bfloat16", tie_embeddings=False)
    model, tokens = NHALanguageModel(config), _tokens(2, 11)
    variables = _variables(config)
    (_, statistics), gradients = _jit(
        jax.value_and_grad(lambda v: _loss(model, v, tokens), has_aux=True)
    )(variables)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}
    assert {s.dtype for s in statistics.values()} == {jnp.dtype(jnp.float32)}
    logits, state = _jit(lambda v: model.apply(v, tokens, return_state=True))(variables)
    assert logits.dtype == jnp.float32
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
    memory = state.layers[0].memory
    assert memory.window_key.dtype == jnp.bfloat16
    assert memory.slot_key.dtype == jnp.float32
    exact = NHALanguageModel(dataclasses.replace(config, dtype="float32"))
    # 4 layers of bfloat16 activations: each product rounds its operands to 2**-9.
    assert _error(logits, _jit(exact.apply)(variables, tokens)) < 3e-2


def test_parameters_and_their_logical_axes():
    config = dataclasses.replace(MIXED, tie_embeddings=False, gate_bias=True, output_bias=True)
    shapes = jax.eval_shape(
        NHALanguageModel(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )["params"]
    assert set(shapes) == {"embed", "layers", "final_norm", "head"}
    boxes = jax.tree.leaves_with_path(
        shapes, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    sizes = {
        "vocab": 23,
        "embed": 16,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "slots": 3,
        "mlp": 24,
        None: 3,  # taps of the convolution
    }
    for path, box in boxes:
        assert isinstance(box, nn.LogicallyPartitioned), path
        assert len(box.names) == box.value.ndim, path
        for name, size in zip(box.names, box.value.shape, strict=True):
            assert size in ((4, 6) if name == "head_dim" else (sizes[name],)), path
        assert (box.names[0] == "layers") == (path[0].key == "layers"), path
    layer = shapes["layers"]["attention"]
    assert layer["gate"]["kernel"].names == ("layers", "embed", "kv_heads", "slots")
    assert layer["output"]["kernel"].names == ("layers", "heads", "head_dim", "embed")
    tied = dataclasses.replace(config, tie_embeddings=True)
    assert count_parameters(config) - count_parameters(tied) == 23 * 16
    assert count_parameters(config) == sum(math.prod(p.shape) for p in jax.tree.leaves(shapes))


def test_boxed_parameters_and_initialisation_with_a_state():
    """What `init` returns can be applied as it is; initialising returns what applying does."""
    config = dataclasses.replace(CONFIG, num_layers=2, windows="3,full@1")
    model, tokens = NHALanguageModel(config), _tokens(1, 5)
    state = model.init_state(1, capacity=8)
    call = {"state": state, "return_state": True}
    (logits, new_state), variables = _jit(lambda key: model.init_with_output(key, tokens, **call))(
        jax.random.key(0)
    )
    applied, applied_state = _jit(lambda v: model.apply(v, tokens, **call))(variables)
    np.testing.assert_allclose(logits, applied, atol=1e-6)
    assert new_state.windows == applied_state.windows == (3, None)
    np.testing.assert_array_equal(new_state.length, [5])
    plain = _jit(lambda v: model.apply(v, tokens))(nn.meta.unbox(variables))
    np.testing.assert_allclose(logits, plain, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tokens": np.zeros((2, 5), np.float32)}, "tokens has shape (2, 5) and dtype float32"),
        ({"tokens": np.zeros((5,), np.int32)}, "tokens has shape (5,)"),
        ({"tokens": np.full((2, 5), 23, np.int32)}, "the id 23, but ids must be from 0 to 22"),
        ({"segment_ids": np.ones((2, 4), np.int32)}, "segment_ids has shape (2, 4)"),
        ({"segment_ids": np.array([[1, 0, 1, 1, 1]] * 2, np.int32)}, "between two tokens"),
        ({"positions": np.zeros((4,), np.int32)}, "positions has shape (4,)"),
        ({"windows": (3, 3)}, "windows lists 2 layers, but the model has 4"),
        ({"windows": np.zeros((3,), np.int32)}, "windows is an array of shape (3,)"),
        ({"windows": np.zeros((4,), np.float32)}, "dtype float32"),
        ({"windows": np.zeros((4,), np.int32), "return_state": True}, "static windows"),
        ({"windows": "4", "state": "3"}, "state is for the windows '3', but this call has '4'"),
        ({"windows": "full", "state": "full"}, "holds at most 4 tokens"),
    ],
)
def test_mistakes_are_named(call, message):
    model = NHALanguageModel(CONFIG)
    call = {"tokens": np.zeros((2, 5), np.int32), **call}
    if "state" in call:
        call["state"] = model.init_state(2, windows=call["state"], capacity=4)
    with pytest.raises(ValueError) as error:
        model.apply(_variables(CONFIG), **call)
    assert message in str(error.value)


def test_full_attention_needs_a_capacity():
    with pytest.raises(ValueError, match="capacity is None, but a layer has full attention"):
        NHALanguageModel(CONFIG).init_state(2, windows="3,full@1")
