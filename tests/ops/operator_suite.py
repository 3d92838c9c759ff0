"""The operator's one suite. An implementation inherits it and overrides what it supports.

Judges: the NumPy float64 oracle for outputs, slots and slot share; for gradients the reference
implementation in float64, which `TestReference` ties to the oracle and to finite differences.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax import NHAState, native_hybrid_attention, native_hybrid_attention_step
from tests.ops import oracle
from tests.ops.cases import CASES, PACKED, Case

# (forward, gradients) by input dtype: DESIGN section 5.
TOLERANCES = {
    jnp.float32: (1e-5, 1e-4),
    jnp.bfloat16: (5e-3, 1e-2),
    jnp.float16: (1e-3, 3e-3),
    jnp.float64: (1e-12, 1e-11),
}
GRADIENT_CASES = (
    "window-5",
    "window-7-packed-slot-inputs",
    "full-packed",
    "sink",
    "many-chunks",
    "hard-gates",
)


def cotangent(shape):
    """A fixed random direction, so that gradients of all outputs are seen at once."""
    return jnp.asarray(np.random.default_rng(99).standard_normal(shape), jnp.float32)


def scalar_loss(arrays, options, window, **kwargs):
    out = native_hybrid_attention(**arrays, **options, window=window, **kwargs)
    wide = jnp.promote_types(out.dtype, jnp.float32)
    return jnp.sum(out.astype(wide) * cotangent(out.shape).astype(wide))


@functools.cache
def exact_gradients(name_or_case, dtype=jnp.float32):
    """Gradients of the float64 reference on inputs rounded to `dtype`."""
    case = CASES[name_or_case] if isinstance(name_or_case, str) else name_or_case
    with jax.enable_x64(True):
        rounded = {name: np.asarray(x, np.float64) for name, x in case.arrays(dtype).items()}
        gradient = jax.jit(
            lambda arrays: jax.grad(scalar_loss)(
                arrays, case.options(), case.window, implementation="reference"
            )
        )
        return jax.tree.map(np.asarray, gradient(jax.tree.map(jnp.asarray, rounded)))


def assert_close(found, expected, tolerance):
    assert np.all(np.isfinite(np.asarray(found, np.float64)))
    assert oracle.relative_error(found, expected) <= tolerance


def choose_cases(metafunc):
    """The suite's cases are those of each class; modules call it in `pytest_generate_tests`."""
    if "case_name" in metafunc.fixturenames:
        metafunc.parametrize("case_name", metafunc.cls.cases)
    if "gradient_case" in metafunc.fixturenames:
        metafunc.parametrize("gradient_case", metafunc.cls.gradient_cases)


class OperatorSuite:
    """Tests that every implementation passes.

    Attributes:
        implementation: The name it is called by.
        dtype: Dtype of the inputs of all tests but one.
        dtypes: The other dtypes it takes.
        cases: Names of the cases whose outputs are judged.
        gradient_cases: Names of those whose gradients are.
        tolerances: (forward, gradients) by dtype of the inputs.
        bitwise: Whether a document's results are the same bits whatever its neighbours hold.
    """

    implementation: str
    dtype: Any = jnp.float32
    dtypes: tuple[Any, ...] = (jnp.bfloat16, jnp.float16, jnp.float64)
    cases: tuple[str, ...] = tuple(CASES)
    gradient_cases: tuple[str, ...] = GRADIENT_CASES
    tolerances = TOLERANCES
    bitwise: bool = True

    def close(self, found, expected):
        """Outputs, slots and shares, and what a step or a split makes of them."""
        assert_close(found, expected, self.tolerances[self.dtype][0])

    def gradients_close(self, found, expected):
        assert_close(found, expected, self.tolerances[self.dtype][1])

    def empty_state(self, case, window, capacity=None):
        return NHAState.init(
            case.B, case.K, case.H, case.V, case.M,
            window=window, capacity=capacity, dtype=self.dtype,
        )  # fmt: skip

    def run(self, arrays, options, window, **kwargs):
        """The operator under jit, the window static."""

        def call(arrays):
            return native_hybrid_attention(
                **arrays, **options, window=window, implementation=self.implementation, **kwargs
            )

        return jax.jit(call)(arrays)

    def step(self, arrays, state, window, **options):
        return native_hybrid_attention_step(
            **arrays, state=state, window=window, implementation=self.implementation, **options
        )

    def test_outputs_slots_and_share(self, case_name):
        case = CASES[case_name]
        arrays, options = case.arrays(self.dtype), case.options()
        expected = oracle.evaluate(**arrays, **options, window=case.window)
        out, state, share = self.run(
            arrays, options, case.window, return_state=True, return_slot_share=True
        )
        assert out.dtype == self.dtype
        self.close(out, expected.out)
        self.close(share, expected.slot_share)
        if case.window is not None:
            slot_key, slot_value = state.slots()
            self.close(slot_key, expected.slot_key)
            self.close(slot_value, expected.slot_value)

    def test_traced_window_is_one_compilation_for_all(self):
        case = CASES["window-16-packed"]
        arrays, options = case.arrays(self.dtype), case.options()
        traces = []

        @jax.jit
        def run(window):
            traces.append(window)
            return native_hybrid_attention(
                **arrays,
                **options,
                window=window,
                return_slot_share=True,
                implementation=self.implementation,
            )

        for window in (0, 1, 7, 16, 26, 44, 45, 2**31 - 1):
            expected = oracle.evaluate(**arrays, **options, window=window)
            out, share = run(jnp.int32(window))
            self.close(out, expected.out)
            self.close(share, expected.slot_share)
        assert len(traces) == 1

    def test_traced_window_that_covers_everything_reads_no_sinks(self):
        case = CASES["sink"]
        arrays, options = case.arrays(self.dtype), case.options()
        out = self.run(arrays, options, jnp.int32(case.T))
        expected = oracle.evaluate(**arrays, **options, window=None)
        self.close(out, expected.out)

    def test_gradients(self, gradient_case):
        case = CASES[gradient_case]
        found = jax.jit(
            lambda arrays: jax.grad(scalar_loss)(
                arrays, case.options(), case.window, implementation=self.implementation
            )
        )(case.arrays(self.dtype))
        for argument, expected in exact_gradients(gradient_case, self.dtype).items():
            self.gradients_close(found[argument], expected)

    def test_gradients_with_a_traced_window(self):
        case = CASES["window-7-packed-slot-inputs"]
        gradient = jax.jit(
            lambda arrays, window: jax.grad(scalar_loss)(
                arrays, case.options(), window, implementation=self.implementation
            )
        )
        found = gradient(case.arrays(self.dtype), jnp.int32(case.window))
        for argument, expected in exact_gradients(
            "window-7-packed-slot-inputs", self.dtype
        ).items():
            self.gradients_close(found[argument], expected)

    def test_low_precision_inputs(self):
        """Outputs and gradients in every other dtype, the gate's included."""
        case = Case(window=8, T=67, H=16, V=16, M=16)
        for dtype in self.dtypes:
            forward, backward = self.tolerances[dtype]
            with jax.enable_x64(dtype == jnp.float64):
                arrays = case.arrays(dtype)
                out = self.run(arrays, case.options(), case.window)
                gradients = jax.jit(
                    lambda arrays: jax.grad(scalar_loss)(
                        arrays, case.options(), case.window, implementation=self.implementation
                    )
                )(arrays)
            # Rotation rounds queries and keys to the inputs' dtype, as a state stores them; so
            # does the judge here.
            judged = oracle.evaluate(**arrays, **case.options(), window=case.window)
            assert out.dtype == dtype
            assert_close(out, judged.out, forward)
            for argument, expected in exact_gradients(case, dtype).items():
                assert_close(gradients[argument], expected, backward)

    @pytest.mark.parametrize("window", [0, 1, 6, 64, None])
    def test_any_split_then_steps_is_one_pass(self, window):
        case = Case(window=window, T=29, slot_inputs=True)
        arrays, options = case.arrays(self.dtype), case.options()
        rotary = options["rotary"]
        expected = oracle.evaluate(**arrays, **options, window=window)

        def part(first, last):
            return {name: x[:, first:last] for name, x in arrays.items()}

        # A state of the whole capacity for full attention; else the default.
        state = self.empty_state(case, window, case.T if window is None else None)
        outs, first = [], 0
        for size in (1, 9, 3):
            tables = tuple(x[first : first + size] for x in rotary)
            out, state = self.run(
                part(first, first + size),
                {"rotary": tables},
                window,
                initial_state=state,
                return_state=True,
            )
            outs.append(out)
            first += size
        step = jax.jit(functools.partial(self.step, window=window))
        for t in range(first, case.T):
            before = jax.tree.map(np.array, state)
            out, new_state = step(part(t, t + 1), state, rotary=tuple(x[t : t + 1] for x in rotary))
            jax.tree.map(np.testing.assert_array_equal, before, state)  # never changed in place
            assert jax.tree.structure(new_state) == jax.tree.structure(state)
            state = new_state
            outs.append(out)
        self.close(jnp.concatenate(outs, axis=1), expected.out)
        assert state.length.tolist() == [case.T] * case.B
        if window is not None:
            self.close(state.slots()[0], expected.slot_key)
            self.close(state.slots()[1], expected.slot_value)

    @pytest.mark.parametrize("window", [0, 5, None])
    def test_packed_sequences_split_anywhere(self, window):
        """A split inside a segment, at its border, and a step that starts a new one."""
        segments = ((20, 1, 17, 7), (9, 2, 34))
        case = Case(window=window, segments=segments)
        arrays, ids = case.arrays(self.dtype), case.segment_ids()
        options = case.options()
        expected = oracle.evaluate(**arrays, **options, window=window)
        state = self.empty_state(case, window, 45)
        outs = []
        for first, last in ((0, 11), (11, 20), (20, 21), (21, 40), (40, 45)):
            out, state = self.run(
                {name: x[:, first:last] for name, x in arrays.items()},
                {
                    "rotary": tuple(x[first:last] for x in options["rotary"]),
                    "segment_ids": ids[:, first:last],
                },
                window,
                initial_state=state,
                return_state=True,
            )
            outs.append(out)
        self.close(jnp.concatenate(outs, axis=1), expected.out)
        assert state.length.tolist() == [7, 34]
        assert state.segment_id.tolist() == [4, 3]

    def test_state_of_another_implementation_continues(self):
        case = Case(window=6, T=40)
        arrays, options = case.arrays(self.dtype), case.options()
        rotary = options["rotary"]
        for capacity in (6, 11):
            state = self.empty_state(case, 6, capacity)
            _, state = native_hybrid_attention(
                **{name: x[:, :21] for name, x in arrays.items()},
                rotary=tuple(x[:21] for x in rotary),
                window=6,
                initial_state=state,
                return_state=True,
                implementation="reference",
            )
            out = self.run(
                {name: x[:, 21:] for name, x in arrays.items()},
                {"rotary": tuple(x[21:] for x in rotary)},
                6,
                initial_state=state,
            )
            expected = oracle.evaluate(**arrays, **options, window=6).out[:, 21:]
            self.close(out, expected)

    @pytest.mark.parametrize("window", [3, None])
    def test_gradients_of_initial_and_final_state(self, window):
        case = Case(window=window, T=19, rotary=False)
        names = ("slot_key", "slot_value", "window_key", "window_slot_key")
        names += ("window_value", "window_log_gate")
        capacity, seen = 40, (2, 11)
        last = np.array([[(n + 19 - 1 - i) % capacity for i in range(3)] for n in seen])

        def weighted(x):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return jnp.sum(x.astype(wide) * cotangent(x.shape).astype(self.dtype).astype(wide))

        def loss(arrays, floats, state, implementation):
            out, final = native_hybrid_attention(
                **arrays,
                window=window,
                initial_state=state.replace(**floats),
                return_state=True,
                implementation=implementation,
            )
            total = weighted(out)
            for name in names:
                x = getattr(final, name)
                if name.startswith("window") and window is not None:
                    x = x[jnp.array([[0], [1]]), last]  # other rows hold nothing that is read
                total += weighted(x)
            return total

        def gradients(dtype, implementation):
            """At inputs that are rounded to the suite's dtype and held in another."""
            state = NHAState.init(
                case.B, case.K, case.H, case.V, case.M,
                window=window, capacity=capacity, dtype=dtype,
            )  # fmt: skip
            rng = np.random.default_rng(5)
            floats = {}
            for name in names:
                held = getattr(state, name)
                stored = jnp.float32 if name.startswith("slot_") else self.dtype
                drawn = jnp.asarray(rng.standard_normal(held.shape), jnp.float32)
                if name == "window_log_gate":
                    drawn, stored = -jnp.abs(drawn), jnp.float32
                floats[name] = drawn.astype(stored).astype(held.dtype)
            state = state.replace(
                length=jnp.array(seen, jnp.int32), segment_id=jnp.array([1, 1], jnp.int32)
            )
            arrays = {
                name: x.astype(
                    jnp.promote_types(dtype, jnp.float32) if name == "log_gate" else dtype
                )
                for name, x in case.arrays(self.dtype).items()
            }
            return jax.jit(
                lambda arrays, floats: jax.grad(loss, argnums=(0, 1))(
                    arrays, floats, state, implementation
                )
            )(arrays, floats)

        with jax.enable_x64(True):
            expected = jax.tree.map(np.asarray, gradients(jnp.float64, "reference"))
        found = gradients(self.dtype, self.implementation)
        for argument, x in expected[0].items():
            self.gradients_close(found[0][argument], x)
        for name in ("slot_key", "slot_value"):
            self.gradients_close(found[1][name], expected[1][name])
        if window is not None:
            # Rows that hold no token of the window are free to carry a gradient or none.
            rows = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 8, 9, 10])
            for name in names[2:]:
                self.gradients_close(found[1][name][rows], expected[1][name][rows])

    def test_documents_do_not_leak(self):
        """Other contents before and after a document leave it as it was, `bitwise`."""
        for window in (0, 7, None):
            case = Case(window=window, segments=PACKED)
            ids, arrays = case.segment_ids(), case.arrays(self.dtype)
            other = case.arrays(self.dtype, seed=1)
            inside = (ids == np.array([[1], [3]]))[:, :, None, None]
            mixed = {name: jnp.where(inside, x, other[name]) for name, x in arrays.items()}
            out = np.asarray(self.run(arrays, case.options(), window))
            changed = np.asarray(self.run(mixed, case.options(), window))
            inside = np.broadcast_to(inside, out.shape)
            if self.bitwise:
                np.testing.assert_array_equal(out[inside], changed[inside])
            else:
                self.close(out[inside], changed[inside])
            assert not np.array_equal(out, changed)

    def test_padding_is_a_no_op_whatever_it_holds(self):
        case = Case(window=5, segments=((20, -8, 17), (-8, 30, -7)))
        arrays, ids = case.arrays(self.dtype), case.segment_ids()
        poisoned = {
            name: jnp.where((ids == 0)[:, :, None, None], jnp.nan, x) for name, x in arrays.items()
        }
        out, state = self.run(poisoned, case.options(), 5, return_state=True)
        expected = oracle.evaluate(**arrays, **case.options(), window=5)
        self.close(out, expected.out)
        assert np.all(np.asarray(out)[ids == 0] == 0)
        self.close(state.slots()[1], expected.slot_value)
        gradients = jax.jit(
            lambda arrays: jax.grad(scalar_loss)(
                arrays, case.options(), 5, implementation=self.implementation
            )
        )(poisoned)
        for gradient in gradients.values():
            assert np.all(np.isfinite(gradient))
            assert np.all(np.asarray(gradient)[ids == 0] == 0)

    def test_padding_leaves_a_state_as_it_was(self):
        case = Case(window=4, T=12)
        arrays, rotary = case.arrays(self.dtype), case.options()["rotary"]
        options = {"rotary": rotary}
        _, state = self.run(arrays, options, 4, return_state=True)
        ids = np.zeros((2, 12), np.int32)
        _, after = self.run(
            arrays, {**options, "segment_ids": ids}, 4, initial_state=state, return_state=True
        )
        jax.tree.map(np.testing.assert_array_equal, state, after)
        one = {name: x[:, :1] for name, x in arrays.items()}
        out, after = self.step(one, state, 4, segment_ids=ids[:, :1])
        assert np.all(np.asarray(out) == 0)
        jax.tree.map(np.testing.assert_array_equal, state, after)

    def test_full_layer_past_its_capacity(self):
        case = Case(window=None, T=5, rotary=False)
        arrays = case.arrays(self.dtype)
        state = self.empty_state(case, None, 7)
        state = self.run(arrays, {}, None, initial_state=state, return_state=True)[1]
        with pytest.raises(ValueError, match=r"at most 7 tokens .* to 10"):
            native_hybrid_attention(
                **arrays, window=None, initial_state=state, implementation=self.implementation
            )

        @jax.jit
        def unseen(arrays, state):  # nothing can be raised: the outputs say so
            return native_hybrid_attention(
                **arrays, window=None, initial_state=state, implementation=self.implementation
            )

        out = np.asarray(unseen(arrays, state))
        assert np.all(np.isfinite(out[:, :2]))
        assert np.all(np.isnan(out[:, 2:]))

    def test_transformations(self):
        """vmap, remat, scan over layers and donated buffers."""
        case = Case(window=5, T=20, rotary=False)
        arrays = case.arrays(self.dtype)
        expected = self.run(arrays, {}, 5)

        def call(arrays):
            return native_hybrid_attention(**arrays, window=5, implementation=self.implementation)

        stacked = jax.tree.map(lambda x: jnp.stack([x, x * 0.5]), arrays)
        mapped = jax.jit(jax.vmap(call))(stacked)
        self.close(mapped[0], expected)

        def layer(total, arrays):
            return total + jnp.sum(jax.checkpoint(call)(arrays), dtype=jnp.float32), None

        def total(stacked):
            return jax.lax.scan(layer, jnp.float32(0), stacked)[0]

        gradients = jax.jit(jax.grad(total), donate_argnums=0)(jax.tree.map(jnp.copy, stacked))
        direct = jax.jit(jax.grad(lambda x: jnp.sum(call(x), dtype=jnp.float32)))(arrays)
        for name, gradient in direct.items():
            self.gradients_close(gradients[name][0], gradient)
