"""What the operator refuses, in one sentence that names the thing, and how it chooses."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax import NHAState, native_hybrid_attention, native_hybrid_attention_step
from nha_jax.ops import api, kernels
from tests.ops.cases import Case

B, T, N, K, H, V, M = 2, 6, 4, 2, 8, 4, 3


def arrays(**changes):
    shapes = {
        "query": (B, T, N, H),
        "key": (B, T, K, H),
        "value": (B, T, K, V),
        "log_gate": (B, T, K, M),
    }
    made = {name: jnp.full(shape, -0.5) for name, shape in shapes.items()}
    return made | changes


def state(**changes):
    return NHAState.init(**(dict(window=3) | dict(zip_sizes()) | changes))


def zip_sizes():
    names = ("batch", "num_kv_heads", "key_width", "value_width", "num_slots")
    return zip(names, (B, K, H, V, M), strict=True)


BAD_CALLS = {
    "rank": ({"key": jnp.ones((B, T, H))}, {}, r"key must have 4 axes .*\(2, 6, 8\)"),
    "list": ({"value": [1.0]}, {}, "value must be an array, but was list"),
    "integers": (
        {"query": jnp.ones((B, T, N, H), jnp.int32)},
        {},
        "query must be bfloat16, float16, float32 or float64, but was int32",
    ),
    "mixed dtypes": (
        {"value": jnp.ones((B, T, K, V), jnp.bfloat16)},
        {},
        "value must have the dtype of query, float32, but is bfloat16",
    ),
    "time": (
        {"key": jnp.ones((B, T + 1, K, H))},
        {},
        r"key must have shape \(2, 6, 2, 8\) .* but has \(2, 7, 2, 8\)",
    ),
    "empty": (
        {"query": jnp.ones((B, 0, N, H)), "key": jnp.ones((B, 0, K, H))},
        {},
        "no empty axis",
    ),
    "groups": (
        {"query": jnp.ones((B, T, 3, H))},
        {},
        "multiple of the 2 key/value heads, but has 3",
    ),
    "gate": (
        {"log_gate": jnp.ones((B, T, N, M))},
        {},
        r"log_gate must have shape \(2, 6, 2, 3\)",
    ),
    "negative window": ({}, {"window": -1}, "window must not be negative, but was -1"),
    "window of floats": ({}, {"window": 2.5}, "window must be None .* but was 2.5"),
    "window of truth": ({}, {"window": True}, "window must be None"),
    "window array": ({}, {"window": jnp.array([1, 2])}, "window must be None"),
    "huge window": ({}, {"window": 2**31 - 1}, r"window must be below 2\*\*31 - 1"),
    "empty slots": ({}, {"empty_slots": "none"}, "'masked' or 'sink', but was 'none'"),
    "scale": ({}, {"scale": "small"}, "scale must be a number or None, but was 'small'"),
    "implementation": (
        {},
        {"implementation": "cuda"},
        "implementation must be None or one of 'reference', .* but was 'cuda'",
    ),
    "rotary pair": ({}, {"rotary": jnp.ones((T, H // 2))}, "rotary"),
    "rotary shape": (
        {},
        {"rotary": (jnp.ones((T, H)), jnp.ones((T, H)))},
        r"cos must have shape \(6, 4\) or \(2, 6, 4\), but has \(6, 8\)",
    ),
    "rotary dtype": (
        {},
        {"rotary": (jnp.ones((T, 4), jnp.bfloat16),) * 2},
        "cos must be float32 .* but was bfloat16",
    ),
    "id shape": (
        {},
        {"segment_ids": np.ones((B, T - 1), np.int32)},
        r"segment_ids must have shape \(2, 6\), but has \(2, 5\)",
    ),
    "id dtype": ({}, {"segment_ids": np.ones((B, T))}, "must be an integer array"),
    "negative id": (
        {},
        {"segment_ids": np.array([[1] * 6, [1, 1, 1, -2, 3, 3]])},
        "found -2 in row 1 at position 3",
    ),
    "padding inside": (
        {},
        {"segment_ids": np.array([[1] * 6, [1, 2, 0, 2, 3, 3]])},
        "in row 1 segment 2 goes on after padding at position 3",
    ),
    "padding before a continued segment": (
        {},
        {
            "initial_state": NHAState.init(B, K, H, V, M, window=3),
            "segment_ids": np.array([[1] * 6, [0, 1, 1, 1, 1, 1]]),
        },
        "only at the end of a row, but row 1",
    ),
    "state of another window": (
        {},
        {"initial_state": NHAState.init(B, K, H, V, M, window=4)},
        "made for window 4, but the call has window 3",
    ),
    "state of another batch": (
        {},
        {"initial_state": NHAState.init(B + 1, K, H, V, M, window=3)},
        r"slot_key must have shape \(2, 2, 3, 8\) here, but has \(3, 2, 3, 8\)",
    ),
    "traced or not, a negative window": (
        {},
        {"window": jnp.int32(-2)},
        "not be negative, but was -2",
    ),
    "positive gate": (
        {"log_gate": jnp.full((B, T, K, M), 0.25)},
        {},
        "log_gate must be <= 0 .* but has 0.25",
    ),
    "scale that is no number": ({}, {"scale": float("nan")}, "scale must be finite, but was nan"),
    "flag": ({}, {"return_state": "yes"}, "return_state must be True or False, but was 'yes'"),
    "id beyond int32": (
        {},
        {"segment_ids": np.full((B, T), 2**32 + 1)},
        r"segment_ids must be at most 2147483647 \(int32\), but has 4294967297",
    ),
    "unlike rotary tables": (
        {},
        {"rotary": (jnp.ones((T, 4)), jnp.ones((B, T, 4)))},
        r"cos and sin must have one shape, but have \(6, 4\) and \(2, 6, 4\)",
    ),
    "state with a broken counter": (
        {},
        {"initial_state": NHAState.init(B, K, H, V, M, window=3).replace(length=0)},
        "initial_state: length must be an array, but was int",
    ),
    "state with a float counter": (
        {},
        {"initial_state": NHAState.init(B, K, H, V, M, window=3).replace(length=jnp.zeros(B))},
        "initial_state: length must be int32, but was float32",
    ),
    "state with low-precision slots": (
        {},
        {
            "initial_state": NHAState.init(B, K, H, V, M, window=3).replace(
                slot_key=jnp.zeros((B, K, M, H), jnp.bfloat16)
            )
        },
        "initial_state: slot_key must be float32 or float64, but was bfloat16",
    ),
    "state that has seen nothing and something": (
        {},
        {
            "initial_state": NHAState.init(B, K, H, V, M, window=3).replace(
                length=jnp.array([0, 4], jnp.int32)
            )
        },
        r"length above 0 needs a segment_id, but they are \[0, 4\] and \[0, 0\]",
    ),
    "no state": ({}, {"initial_state": 3}, "initial_state must be an NHAState, but was int"),
    "state with a traced window": (
        {},
        {"window": jnp.int32(3), "return_state": True},
        "window is an array, .* need a static integer window",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name):
    changes, options, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        native_hybrid_attention(**arrays(**changes), **({"window": 3} | options))


def test_step_takes_one_token():
    one = {name: x[:, :1] for name, x in arrays().items()}
    out, new = native_hybrid_attention_step(**one, state=state(), window=3)
    assert out.shape == (B, 1, N, V)
    assert new.length.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"a time axis of 1, but query has shape \(2, 6, 4, 8\)"):
        native_hybrid_attention_step(**arrays(), state=state(), window=3)
    with pytest.raises(ValueError, match="state must be an NHAState, but was NoneType"):
        native_hybrid_attention_step(**one, state=None, window=3)
    with pytest.raises(ValueError, match="made for window 3, but the call has window 2"):
        native_hybrid_attention_step(**one, state=state(), window=2)
    with pytest.raises(ValueError, match="made for window 3, but the call has window None"):
        native_hybrid_attention_step(**one, state=state(), window=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, but was 0"),
        ({"num_slots": -1}, "num_slots must not be negative, but was -1"),
        ({"window": -3}, "window must not be negative, but was -3"),
        ({"window": None}, "full attention .* needs capacity, .* but it was None"),
        ({"capacity": 2}, "capacity must be at least the window 3, but was 2"),
        ({"dtype": jnp.int32}, "dtype must be floating point, but was .*int32"),
        ({"dtype": "floaty"}, "dtype must be floating point, but was 'floaty'"),
        ({"dtype": jnp.float64}, "float64 needs 64 bits"),
        ({"key_width": "8"}, "key_width must be an integer, but was '8'"),
        ({"window": True}, "window must be an integer, but was True"),
        ({"capacity": 4.0}, "capacity must be an integer, but was 4.0"),
    ],
)
def test_bad_state(changes, message):
    with pytest.raises(ValueError, match=message):
        state(**changes)


def test_state_is_what_the_design_says():
    bf16 = state(dtype=jnp.bfloat16, capacity=5)
    assert bf16.slot_key.dtype == bf16.window_log_gate.dtype == jnp.float32
    assert bf16.window_key.dtype == bf16.window_value.dtype == jnp.bfloat16
    assert bf16.window_slot_key.shape == (B, 5, K, H)
    full = state(window=None, capacity=9)
    assert full.window_key.shape == (B, 9, K, H)
    assert full.window_slot_key.shape == (B, 0, K, H)
    assert full.window_log_gate.shape == (B, 0, K, M)
    assert state(window=0).capacity == 0


@pytest.mark.parametrize("name", ["pallas", "triton"])
def test_named_implementation_that_cannot_run_says_why(name):
    with pytest.raises(NotImplementedError, match=f"'{name}' cannot run: .*{name} kernels"):
        native_hybrid_attention(**arrays(), window=3, implementation=name)


@pytest.mark.parametrize(
    ("name", "capability", "problem"),
    [
        ("pallas", "8.0", "Hopper generation (compute capability 9.0), but a GPU has '8.0'"),
        ("pallas", "9.0", None),
        ("pallas", "10.0", "but a GPU has '10.0'"),
        ("triton", "8.9", "Blackwell generation (compute capability 9.0 or 10.0 or 10.3), but"),
        ("triton", "10.0", None),
        ("triton", "12.0", "but a GPU has '12.0'"),
        ("triton", "", "but a GPU has ''"),
    ],
)
def test_kernels_say_which_gpu_they_need(monkeypatch, name, capability, problem):
    class Device:
        device_kind = "a GPU"
        compute_capability = capability

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    found = kernels.device_problem(name)
    assert (found is None) == (problem is None)
    assert problem is None or problem in found


@pytest.mark.parametrize(
    ("dtype", "sizes", "absent", "expected"),
    [
        (jnp.bfloat16, {}, (), "triton"),
        (jnp.float16, {}, ("triton",), "pallas"),
        (jnp.bfloat16, {}, ("triton", "pallas"), "xla"),
        (jnp.bfloat16, {"M": 130}, (), "xla"),  # more slots than a tile has
        (jnp.float32, {}, (), "xla"),
    ],
)
def test_choice_on_a_gpu(monkeypatch, dtype, sizes, absent, expected):
    monkeypatch.setattr(kernels, "missing", lambda name: "not here" if name in absent else None)
    chosen = []
    monkeypatch.setattr(api, "_log_choice", chosen.append)
    monkeypatch.setattr(kernels, "run", lambda *_, **__: (None, None, None))
    native_hybrid_attention(**Case(window=3, T=4, **sizes).arrays(dtype), window=3)
    assert chosen == [expected]


def test_the_choice_is_explained_and_logged_once(caplog):
    chosen, found = api.explain_choice()
    assert [each.name for each in found] == list(api.IMPLEMENTATIONS)
    assert {each.name: each.available for each in found}[chosen]
    assert all(each.reason for each in found)
    api._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="nha_jax.ops.api"):
        for _ in range(3):
            native_hybrid_attention(**arrays(), window=3)
    assert [record.args[0] for record in caplog.records] == [chosen]


def test_results_come_in_the_order_of_the_design():
    out = native_hybrid_attention(**arrays(), window=3)
    same, new_state, share = native_hybrid_attention(
        **arrays(), window=3, return_state=True, return_slot_share=True
    )
    np.testing.assert_allclose(out, same, rtol=1e-6)
    assert isinstance(new_state, NHAState)
    assert share.shape == (B, T, N)
    _, only_share = native_hybrid_attention(**arrays(), window=3, return_slot_share=True)
    np.testing.assert_allclose(only_share, share, rtol=1e-6)


def test_numpy_arrays_and_integers_are_taken():
    numpy_arrays = {name: np.asarray(x) for name, x in arrays().items()}
    out = native_hybrid_attention(**numpy_arrays, window=np.int64(3))
    np.testing.assert_allclose(out, native_hybrid_attention(**arrays(), window=3), rtol=1e-6)


def test_unseen_ids_under_jit_are_taken_as_they_come():
    ids = jnp.array([[1, 1, 2, 2, 0, 0], [0, 3, 3, 3, 4, 4]], jnp.int32)
    out = jax.jit(lambda ids: native_hybrid_attention(**arrays(), window=3, segment_ids=ids))(ids)
    np.testing.assert_array_equal(np.asarray(out)[np.asarray(ids) == 0], 0)


def test_constants_inside_jit_are_checked_too():
    """What is closed over has values, but operations on it inside jit do not."""
    made = arrays()

    @jax.jit
    def run(query):
        constants = made | {"query": query}
        return native_hybrid_attention(**constants, window=jnp.int32(3))

    np.testing.assert_allclose(
        run(made["query"]), native_hybrid_attention(**made, window=3), rtol=1e-6
    )
    made["log_gate"] = made["log_gate"] + 1
    with pytest.raises(ValueError, match="log_gate must be <= 0"):
        jax.jit(lambda query: native_hybrid_attention(**made | {"query": query}, window=3))(
            made["query"]
        )
