"""Both implementations in plain JAX pass the operator's suite; each with tests of its own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from nha_jax import native_hybrid_attention
from tests.ops import oracle
from tests.ops.cases import CASES, Case
from tests.ops.operator_suite import OperatorSuite, assert_close, choose_cases


def pytest_generate_tests(metafunc):
    choose_cases(metafunc)


GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.npz"))


class TestReference(OperatorSuite):
    implementation = "reference"
    # Its gradients in float64 are the judge of the others; the cases here show that rounding to
    # float32 does them no harm, finite differences that they are right.
    gradient_cases = ("window-7-packed-slot-inputs", "hard-gates")
    dtypes = (jnp.bfloat16, jnp.float64)

    def test_gradients_against_finite_differences(self, x64):
        case = Case(window=3, T=8, B=1, N=2, K=1, H=4, V=3, M=3)
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), case.arrays())

        def call(arrays):
            return native_hybrid_attention(
                **arrays, **case.options(), window=3, implementation="reference"
            )

        check_grads(jax.jit(call), (arrays,), order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


class TestXla(OperatorSuite):
    implementation = "xla"

    @pytest.mark.parametrize("window", [2048, None, "traced"])
    def test_memory_does_not_grow_with_the_window(self, window):
        """No T x W array: a window of 128 and one of 2048 or more need about the same."""

        def temporary_bytes(window):
            case = Case(window=None, T=4096, B=1, N=2, K=1, H=16, V=16, M=4, rotary=False)

            def loss(arrays, traced):
                chosen = traced if window == "traced" else window
                return jnp.sum(
                    native_hybrid_attention(**arrays, window=chosen, implementation="xla")
                )

            shapes = jax.eval_shape(case.arrays), jax.ShapeDtypeStruct((), jnp.int32)
            compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
            return compiled.memory_analysis().temp_size_in_bytes

        assert temporary_bytes(window) <= 1.5 * temporary_bytes(128)

    @pytest.mark.skipif(
        jax.default_backend() != "cpu",
        reason="reads the memory plan of XLA's CPU compiler; on a GPU autotuned scratch is in it",
    )
    def test_memory_is_linear_in_time(self):
        def temporary_bytes(length):
            case = Case(window=64, T=length, B=1, N=2, K=2, H=16, V=16, M=16, rotary=False)
            shapes = jax.eval_shape(case.arrays)

            def loss(arrays):
                return jnp.sum(native_hybrid_attention(**arrays, window=64, implementation="xla"))

            compiled = jax.jit(jax.grad(loss)).lower(shapes).compile()
            return compiled.memory_analysis().temp_size_in_bytes

        assert temporary_bytes(16384) <= 2.2 * temporary_bytes(8192)

    def test_many_groups_of_blocks(self, monkeypatch):
        """With a budget of nothing every block is a group of its own; results are the same."""
        monkeypatch.setattr("nha_jax.ops.window_attention._LOGITS_BUDGET", 1)
        monkeypatch.setattr("nha_jax.ops.chunked._READ_BUDGET", 1)
        for name in ("many-chunks", "full-packed", "window-16-packed"):
            self.test_outputs_slots_and_share(name)
            if name != "window-16-packed":
                self.test_gradients(name)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_cases(path, implementation):
    """Cases evaluated in float64 elsewhere, kept as files with their inputs."""
    golden = dict(np.load(path))
    window = None if golden["window"] < 0 else int(golden["window"])
    inputs = [golden[name] for name in ("query", "key", "value", "log_gate")]

    @jax.jit
    def run(inputs, rotary):
        return native_hybrid_attention(
            *inputs,
            window=window,
            rotary=rotary,
            segment_ids=golden.get("segment_ids"),
            empty_slots=str(golden.get("empty_slots", "masked")),
            return_state=True,
            return_slot_share=True,
            implementation=implementation,
        )

    rotary = [jnp.asarray(golden[name], jnp.float32) for name in ("cos", "sin")]
    out, state, share = run(inputs, rotary)
    assert_close(out, golden["out"], 1e-5)
    assert_close(share, golden["slot_share"], 1e-5)
    if window is not None:
        assert_close(state.slots()[0], golden["final_slot_key"], 1e-5)
        assert_close(state.slots()[1], golden["final_slot_value"], 1e-5)


def test_golden_cases_are_here():
    assert len(GOLDEN) == 8


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("window", [45, 46, None])
def test_wide_window_is_softmax_attention(window, implementation):
    """W >= T equals JAX's own causal attention; the judge shares nothing with this library."""
    case = Case(window=window, rotary=False, V=8)
    arrays = case.arrays()
    out = native_hybrid_attention(**arrays, window=window, implementation=implementation)
    with jax.default_matmul_precision("highest"):  # the judge must not run in TF32 on a GPU
        expected = jax.nn.dot_product_attention(
            arrays["query"], arrays["key"], arrays["value"], is_causal=True
        )
    assert_close(out, expected, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_no_slots_is_sliding_window_attention(implementation):
    case = Case(window=6, M=0, rotary=False, V=8)
    arrays = case.arrays()
    out = native_hybrid_attention(**arrays, window=6, implementation=implementation)
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            is_causal=True,
            local_window_size=(5, 0),
        )
    assert_close(out, expected, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_window_zero_is_gated_slot_attention(implementation):
    """Two passes of gated linear attention (arXiv 2409.07146, section 3): write, then read."""
    case = Case(window=0, rotary=False, N=2, K=2)
    x = {name: np.asarray(a, np.float64) for name, a in case.arrays().items()}
    keys = np.zeros((case.B, case.K, case.M, case.H))
    values = np.zeros((case.B, case.K, case.M, case.V))
    expected = []
    for t in range(case.T):
        retention = np.exp(x["log_gate"][:, t])[..., None]
        keys = retention * keys + (1 - retention) * x["key"][:, t, :, None]
        values = retention * values + (1 - retention) * x["value"][:, t, :, None]
        logits = np.einsum("bkmh,bkh->bkm", keys, x["query"][:, t]) * case.H**-0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected.append(np.einsum("bkm,bkmv->bkv", weights, values))
    out = native_hybrid_attention(**case.arrays(), window=0, implementation=implementation)
    assert_close(out, np.stack(expected, axis=1), 1e-5)


def test_oracle_is_told_apart_from_wrong_windows():
    """W counts the token itself: off by one is far outside every tolerance."""
    case = CASES["window-5"]
    arrays, options = case.arrays(), case.options()
    right = oracle.evaluate(**arrays, **options, window=5).out
    for wrong in (4, 6):
        off = oracle.evaluate(**arrays, **options, window=wrong).out
        assert oracle.relative_error(off, right) > 0.05


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("gate", [-1e-4, -9.0, -20.0, -60.0])
def test_gate_gradients_where_nothing_but_nearly_closed_gates_are(gate, implementation):
    """1 - exp(g) must not lose its derivative -exp(g), small as it is beside everything else."""
    case = Case(window=0, T=6, B=1, N=1, K=1, H=4, V=3, M=1, rotary=False)
    arrays = case.arrays() | {"log_gate": jnp.full((1, 6, 1, 1), gate, jnp.float32)}

    def loss(arrays):
        out = native_hybrid_attention(**arrays, window=0, implementation=implementation)
        return jnp.sum(out)

    found = np.asarray(jax.jit(jax.grad(loss))(arrays)["log_gate"], np.float64)[0, :, 0, 0]
    # One slot is read with weight 1: the loss is the sum over t of its value S_t.
    values = np.asarray(arrays["value"], np.float64)[0, :, 0].sum(axis=-1)
    retention, slot, adjoint = np.exp(gate), [0.0], [0.0]
    for value in values:
        slot.append(retention * slot[-1] - np.expm1(gate) * value)
    for _ in values:
        adjoint.append(1.0 + retention * adjoint[-1])
    adjoint = np.array(adjoint[1:])[::-1]
    expected = adjoint * retention * (np.array(slot[:-1]) - values)
    assert_close(found, expected, 1e-4)
