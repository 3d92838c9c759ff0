"""`NativeHybridAttention` against a float64 program of its own, token by token in NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nha_jax.modules.attention import NativeHybridAttention
from nha_jax.ops.windows import FULL

# Compiling is most of what these tests take, and this halves it. The comparison with the float64
# program compiles for speed.
_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
WIDTH, LENGTH = 12, 11
SEGMENTS = np.array([[1] * 4 + [0] + [2] * 6, [3] * 8 + [0] * 3], np.int32)


def _silu(x):
    return x / (1 + np.exp(-x))


def _norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def _rotate(x, position, theta):
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
    )


def _segment(params, x, module):
    """The module on one whole segment [T, D]; returns the output [T, D] and slot share [T, N]."""
    maps = {"silu": _silu, "relu": lambda y: np.maximum(y, 0), "identity": lambda y: y}
    heads = {}
    for name in ("query", "key", "value", "gate"):
        weights = params[name]
        y = np.einsum("td,dnh->tnh", x, weights["kernel"]) + weights.get("bias", 0)
        if module.conv_width and name != "gate":
            kernel = params[f"{name}_convolution"]["kernel"]
            padded = np.concatenate([np.zeros((module.conv_width - 1, *y.shape[1:])), y])
            y = np.stack(
                [
                    sum(kernel[i] * padded[t + i] for i in range(module.conv_width))
                    for t in range(len(x))
                ]
            )
        heads[name] = y
    query, key, value = heads["query"], heads["key"], maps[module.value_activation](heads["value"])
    log_gate = -np.log1p(np.exp(-heads["gate"])) / module.gate_temperature
    if module.qk_norm:
        query = _norm(query, params["query_norm"]["scale"], module.norm_epsilon)
        key = _norm(key, params["key_norm"]["scale"], module.norm_epsilon)
    feature_map = maps[module.feature_map]
    length, num_heads, key_width = query.shape
    num_kv_heads = key.shape[1]
    window = length if module.window is None else module.window
    outs = np.zeros((length, num_heads, value.shape[-1]))
    shares = np.zeros((length, num_heads))
    for k in range(num_kv_heads):
        slot_keys = np.zeros((module.num_slots, key_width))
        slot_values = np.zeros((module.num_slots, value.shape[-1]))
        for t in range(length):
            e = t - window
            if e >= 0:
                keep = np.exp(log_gate[e, k])[:, None]
                slot_keys = keep * slot_keys + (1 - keep) * feature_map(key[e, k])
                slot_values = keep * slot_values + (1 - keep) * value[e, k]
            seen = range(max(0, e + 1), t + 1)
            sink = module.empty_slots == "sink" and module.window is not None
            slots = module.num_slots if e >= 0 or sink else 0
            group = num_heads // num_kv_heads
            for n in range(k * group, (k + 1) * group):
                rotated = _rotate(query[t, n], t, module.rotary_theta)
                logits = [feature_map(query[t, n]) @ slot_keys[m] for m in range(slots)]
                logits += [rotated @ _rotate(key[j, k], j, module.rotary_theta) for j in seen]
                weights = np.exp(np.array(logits) * key_width**-0.5)
                weights /= weights.sum()
                shares[t, n] = weights[:slots].sum()
                outs[t, n] = weights[:slots] @ slot_values[:slots]
                outs[t, n] += sum(
                    w * value[j, k] for w, j in zip(weights[slots:], seen, strict=True)
                )
    if module.output_norm:
        outs = _norm(outs, params["output_norm"]["scale"], module.norm_epsilon)
    output = params["output"]
    return np.einsum("tnv,nvd->td", outs, output["kernel"]) + output.get("bias", 0), shares


def _oracle(variables, x, segment_ids, module):
    """Every segment on its own; zeros where padded."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), variables["params"])
    out = np.zeros(x.shape)
    shares = np.zeros((*x.shape[:2], module.num_heads))
    for row, ids in enumerate(segment_ids):
        for segment in set(ids) - {0}:
            where = np.flatnonzero(ids == segment)
            found = _segment(params, np.asarray(x[row, where], np.float64), module)
            out[row, where], shares[row, where] = found
    return out, shares


def _make(seed=0, **fields):
    """A module with random parameters, norm scales and biases included, and an input."""
    module = NativeHybridAttention(num_heads=4, num_kv_heads=2, key_width=6, num_slots=3, **fields)
    x = jax.random.normal(jax.random.key(seed), (2, LENGTH, WIDTH))
    shapes = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    rng = np.random.default_rng(seed)
    variables = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.5, jnp.float32), shapes
    )
    return module, variables, x


def _error(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


OPTIONS = {
    "plain": {"window": 3},
    "everything": {
        "window": 2,
        "value_width": 5,
        "gate_temperature": 2.0,
        "qk_norm": True,
        "qkv_bias": True,
        "output_bias": True,
        "gate_bias": True,
        "conv_width": 3,
        "feature_map": "relu",
        "value_activation": "silu",
        "output_norm": True,
        "rotary_theta": 100.0,
    },
    "slots only": {"window": 0, "feature_map": "identity", "conv_width": 2},
    "full": {"window": None, "qk_norm": True},
    "sink": {"window": 4, "empty_slots": "sink"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_agrees_with_a_float64_program(name):
    module, variables, x = _make(**OPTIONS[name])
    out, slot_share = jax.jit(
        lambda v, x: module.apply(v, x, segment_ids=SEGMENTS, return_slot_share=True)
    )(variables, x)
    expected, expected_share = _oracle(variables, x, SEGMENTS, module)
    assert _error(out, expected) < 1e-5
    np.testing.assert_allclose(slot_share, expected_share, atol=1e-5)
    assert not np.any(np.asarray(out)[SEGMENTS == 0])


def test_what_stands_in_padding_does_not_matter():
    module, variables, x = _make(**OPTIONS["everything"])
    poisoned = jnp.where((SEGMENTS > 0)[..., None], x, jnp.nan)

    @_jit
    def loss_and_gradients(v, x):
        def loss(v, x):
            return jnp.sum(jnp.square(module.apply(v, x, segment_ids=SEGMENTS)))

        return jax.value_and_grad(loss, argnums=(0, 1))(v, x)

    loss, (gradients, x_gradient) = loss_and_gradients(variables, x)
    other_loss, (other, other_x) = loss_and_gradients(variables, poisoned)
    assert loss == other_loss
    jax.tree.map(np.testing.assert_array_equal, gradients, other)
    np.testing.assert_array_equal(x_gradient, other_x)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients))
    assert not np.any(np.asarray(x_gradient)[SEGMENTS == 0])


def test_a_split_sequence_goes_on_where_it_stopped():
    """Prefills of several lengths and single steps, over a document boundary and into padding."""
    module, variables, x = _make(**OPTIONS["everything"])
    ids = np.array([[5] * 6 + [7] * 5, [5] * 9 + [0] * 2], np.int32)
    apply = _jit(
        lambda v, x, ids, state: module.apply(
            v, x, segment_ids=ids, state=state, return_state=True, return_slot_share=True
        )
    )
    whole, whole_share = _oracle(variables, x, ids, module)
    for cuts in ([3, 1, 1, 1, 4, 1], [4, 7], [1] * LENGTH):
        state = module.init_state(2, dtype=jnp.float32)
        outs, shares, start = [], [], 0
        for length in cuts:
            piece = slice(start, start + length)
            out, state, share = apply(variables, x[:, piece], ids[:, piece], state)
            outs.append(out)
            shares.append(share)
            start += length
        assert _error(jnp.concatenate(outs, axis=1), whole) < 1e-5
        np.testing.assert_allclose(jnp.concatenate(shares, axis=1), whole_share, atol=1e-5)
        np.testing.assert_array_equal(state.memory.length, [5, 9])
        np.testing.assert_array_equal(state.memory.segment_id, [7, 5])


def test_positions_count_inside_segments_unless_given():
    module, variables, x = _make(window=3)
    inside = np.array([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5], [*range(8), 0, 0, 0]], np.int32)

    def apply(positions):
        return module.apply(variables, x, segment_ids=SEGMENTS, positions=positions)

    counted = _jit(lambda: apply(None))()
    apply = _jit(apply)
    np.testing.assert_allclose(counted, apply(inside), rtol=1e-5, atol=1e-5)
    # Rotary embedding is relative: another origin is the same, another spacing is not.
    np.testing.assert_allclose(counted, apply(inside + 100), atol=1e-4)
    assert _error(counted, np.asarray(apply(inside * 3))) > 1e-2


def test_the_window_of_the_call_comes_first():
    module, variables, x = _make(window=3)
    as_data = _jit(lambda x, window: module.apply(variables, x, window=window))
    expected = {w: np.asarray(as_data(x, jnp.int32(w))) for w in (3, 5, FULL)}
    assert _error(expected[3], expected[5]) > 1e-3
    for window, same in ((None, 3), (5, 5), ("full", FULL)):
        out = _jit(lambda x, w=window: module.apply(variables, x, window=w))(x)
        np.testing.assert_allclose(out, expected[same], rtol=1e-5, atol=1e-5)


def test_without_slots_it_is_sliding_window_attention():
    module = NativeHybridAttention(num_heads=2, num_slots=0, window=3)
    x = jax.random.normal(jax.random.key(0), (1, 6, 8))
    variables = nn.meta.unbox(_jit(module.init)(jax.random.key(1), x))
    out, share, statistics = _jit(
        lambda v, x: module.apply(v, x, return_slot_share=True, return_statistics=True)
    )(variables, x)
    expected, _ = _oracle(variables, x, np.ones((1, 6), np.int32), module)
    assert _error(out, expected) < 1e-5
    assert not np.any(share)
    assert all(np.isfinite(value) for value in statistics.values())


def test_low_precision_keeps_gate_and_state_in_float32():
    module, variables, x = _make(window=2, dtype=jnp.bfloat16)
    exact, _ = _oracle(variables, x, SEGMENTS, module)
    out, state, statistics = _jit(
        lambda v, x: module.apply(
            v, x, segment_ids=SEGMENTS, return_state=True, return_statistics=True
        )
    )(variables, x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert state.memory.slot_key.dtype == jnp.float32
    assert state.memory.window_key.dtype == jnp.bfloat16
    assert state.memory.window_log_gate.dtype == jnp.float32
    assert {value.dtype for value in statistics.values()} == {jnp.dtype(jnp.float32)}
    # Rounding the input, weights, heads and output to 8 bits each: several times 2**-9.
    assert _error(out, exact) < 2e-2


def test_works_in_nnx_through_its_bridge():
    module, variables, x = _make(window=3)
    with nnx.use_eager_sharding(False):  # the parameters carry logical axes, but there is no mesh
        bridged = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x[:, :1])
    linen = {"params": nnx.to_pure_dict(nnx.state(bridged, nnx.Param))}
    assert jax.tree.map(jnp.shape, linen) == jax.tree.map(jnp.shape, variables)
    out = nnx.jit(lambda m, x: m(x, segment_ids=jnp.asarray(SEGMENTS)))(bridged, x)
    expected, _ = _oracle(linen, x, SEGMENTS, module)
    assert _error(out, expected) < 1e-5
    gradients = nnx.jit(nnx.grad(lambda m: jnp.sum(jnp.square(m(x)))))(bridged)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        ({"num_heads": 3}, {}, "num_heads is 3, but must be a multiple of num_kv_heads"),
        ({"key_width": 5}, {}, "key_width is 5, but must be even"),
        ({"key_width": None, "num_heads": 8}, {}, "not a multiple of num_heads"),
        ({"feature_map": "elu"}, {}, "feature_map is 'elu'"),
        ({"value_activation": "relu"}, {}, "value_activation is 'relu'"),
        ({"conv_width": -1}, {}, "conv_width is -1"),
        ({"gate_temperature": 0.0}, {}, "gate_temperature is 0.0"),
        ({"window": -3}, {}, "-3"),
        ({}, {"window": "wide"}, "'wide'"),
        ({}, {"segment_ids": np.ones((2, 3), np.int32)}, "segment_ids has shape (2, 3)"),
        ({}, {"positions": np.zeros((3,), np.int32)}, "positions has shape (3,)"),
        ({"empty_slots": "zero"}, {}, "empty_slots"),
    ],
)
def test_mistakes_are_named(fields, call, message):
    base = {"num_heads": 4, "num_kv_heads": 2, "key_width": 6, "num_slots": 3, "window": 2}
    module = NativeHybridAttention(**{**base, **fields})
    with pytest.raises(ValueError) as error:
        jax.eval_shape(
            lambda x: module.init(jax.random.key(0), x, **call), jnp.zeros((2, LENGTH, WIDTH))
        )
    assert message in str(error.value)


def test_states_that_do_not_fit_are_refused():
    module, variables, x = _make(window=3, conv_width=2)
    with pytest.raises(ValueError, match="capacity"):
        module.init_state(2, window="full")
    with pytest.raises(ValueError, match="window"):
        module.apply(variables, x, state=module.init_state(2, window=4))
    without = module.clone(conv_width=0).init_state(2)
    with pytest.raises(ValueError, match="no convolution tails"):
        module.apply(variables, x, state=without)
    with pytest.raises(ValueError, match="needs it"):
        NativeHybridAttention(num_heads=2).init_state(1)


def test_an_id_that_comes_back_is_a_new_segment():
    """Segments are unbroken runs: neither the convolution nor the window looks past one."""
    module, variables, x = _make(window=3, conv_width=4)
    back = np.array([[1, 1, 2, 1, 1, 1, 3, 1, 1, 1, 1]] * 2, np.int32)
    apart = np.array([[1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 5]] * 2, np.int32)
    run = _jit(lambda ids: module.apply(variables, x, segment_ids=ids))
    np.testing.assert_array_equal(run(back), run(apart))
