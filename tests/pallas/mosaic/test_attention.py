"""The kernels against float64 on a CPU: in the GPU interpreter with race detection, and lowered.

The interpreter takes seconds a case, so each case holds several things at once. Sizes and dtypes
beyond these run on a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas.mosaic import MosaicConfig, attention, unsupported
from tests.ops import oracle
from tests.ops.operator_suite import TOLERANCES, assert_close
from tests.pallas.mosaic.contract import Contract, expected, judge, value_and_gradients

# The interpreter takes no left operands from registers.
INTERPRETED = MosaicConfig(register_operands=False)

GRADIENT_CASES = {
    # tails, two rows, groups of heads, padded widths and slots, padding between segments
    "packed": Contract(17, T=140, N=2, K=2, B=1, H=32, V=96, M=24, segments=((70, 20, -10, 40),)),
    "hard-gates": Contract(64, T=128, hard_gates=True, N=1),
    # three window tiles, history and initial slots
    "history": Contract(80, T=70, P=80, seen=100, N=1),
}
FORWARD_CASES = {
    "gated-slots": Contract(0, T=100, N=1),
    "sink-traced": Contract(40, T=66, N=1, sink=True, traced=True),
    "sink-traced-full": Contract(66, T=66, N=1, sink=True, traced=True),
    "full-packed": Contract(None, T=200, N=1, segments=((130, 70),)),
    "float16-hard-gates": Contract(64, T=128, N=1, hard_gates=True, dtype=jnp.float16),
}


def interpreted(capsys, run):
    """What `run()` gives in the GPU interpreter, which must find no race."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        results = jax.block_until_ready(run())
    assert "RACE DETECTED" not in capsys.readouterr().out
    return results


def assert_results(found, exact, tolerance):
    for x, y in zip(found, exact, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(np.asarray(x, np.float64), y, tolerance)


def assert_results_and_gradients(found, case):
    results, gradients = found
    exact_results, exact_gradients = expected(case)
    forward, backward = TOLERANCES[case.dtype]
    assert_results(results, exact_results, forward)
    assert set(gradients) == set(exact_gradients)
    for argument, exact in exact_gradients.items():
        assert_close(np.asarray(gradients[argument], np.float64), exact, backward)


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_results_and_gradients(capsys, name):
    case = GRADIENT_CASES[name]

    def run():
        return value_and_gradients(
            lambda x: attention(*x, **case.options, config=INTERPRETED), case.arrays()
        )

    assert_results_and_gradients(interpreted(capsys, run), case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*GRADIENT_CASES, *FORWARD_CASES])
def test_on_a_gpu(name):
    """What the interpreter cannot see: registers, asynchronous products, memory that is shared."""
    case = (GRADIENT_CASES | FORWARD_CASES)[name]
    run = jax.jit(lambda x: value_and_gradients(lambda y: attention(*y, **case.options), x))
    found = run(case.arrays())
    assert_results_and_gradients(found, case)
    for first, second in zip(
        jax.tree.leaves(found), jax.tree.leaves(run(case.arrays())), strict=True
    ):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_results(capsys, name):
    case = FORWARD_CASES[name]

    def run():
        return attention(*case.arrays(), **case.options, config=INTERPRETED)

    results = interpreted(capsys, run)
    assert_results(results, expected(case)[0], TOLERANCES[case.dtype][0])


@pytest.mark.parametrize("case", [GRADIENT_CASES["packed"], FORWARD_CASES["gated-slots"]])
def test_shapes_are_those_of_the_arrays(case):
    described = [(x.shape, x.dtype) for x in case.arrays() if x is not None]
    assert described == [(x.shape, x.dtype) for x in case.shapes if x is not None]


def test_judge():
    """The judge agrees with the operator's oracle where both can say something."""
    case = Contract(5, T=40, N=2, H=8, V=8, M=4, segments=((20, -3, 17),), dtype=jnp.float32)
    query, key, value, log_gate, slot_query, slot_key, *_ = arrays = case.arrays()
    ids = np.cumsum(case.number == 0, axis=1) * (case.number >= 0)
    exact = oracle.evaluate(
        query, key, value, log_gate, window=5, slot_query=slot_query, slot_key=slot_key,
        segment_ids=ids,
    )  # fmt: skip
    out, share, slots = judge(arrays, case)
    assert_close(out, exact.out, 1e-5)
    assert_close(share, exact.slot_share, 1e-5)
    assert_close(slots[..., :8], exact.slot_key, 1e-5)


# Sizes of a training step that must compile: nothing the backend refuses, shared memory that fits.
PRODUCTION = {
    "many-heads": Contract(32, B=8, T=2048, N=16, K=16),
    "groups-of-4": Contract(64, T=32768, N=32, K=8, H=128, V=128),
    "most-slots-long-window": Contract(256, T=8192, N=32, K=8, H=128, V=128, M=128),
}


@pytest.mark.parametrize("name", PRODUCTION)
def test_lowers_for_a_gpu(name):
    case = PRODUCTION[name]

    def gradients(arguments):
        return value_and_gradients(lambda x: attention(*x, **case.options), arguments)

    text = jax.jit(gradients).trace(case.shapes).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("nha_prepare", "nha_scan", "nha_output", "nha_slot_gradient"):
        assert kernel in text


def test_lowers_under_transformations():
    """Rematerialised, differentiated, mapped and scanned over, all at once."""
    case = Contract(20, T=64, N=1)
    query, *others = case.arrays()

    def loss(query):
        run = jax.checkpoint(lambda x: attention(x, *others, **case.options)[0])
        return jnp.sum(run(query).astype(jnp.float32))

    def scanned(queries):
        return jax.lax.scan(lambda _, x: (None, jax.vmap(jax.grad(loss))(x)), None, queries)[1]

    queries = jax.ShapeDtypeStruct((2, 3, *query.shape), query.dtype)
    lowered = jax.jit(scanned).trace(queries).lower(lowering_platforms=("cuda",))
    assert lowered.out_info.shape == queries.shape


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": jnp.float16, "key_width": 32, "num_slots": 8}, None),
        ({"dtype": jnp.float32}, "bfloat16 and float16, not float32"),
        ({"key_width": 256}, "key heads are at most 128 wide, but these are 256"),
        ({"value_width": 192}, "value heads are at most 128 wide, but these are 192"),
        ({"num_slots": 200}, "at most 128 slots fit a tile, but there are 200"),
    ],
)
def test_unsupported(changes, reason):
    sizes = dict(
        dtype=jnp.bfloat16, num_heads=8, num_kv_heads=2, key_width=128, value_width=128,
        num_slots=64,
    )  # fmt: skip
    found = unsupported(**sizes | changes)
    if reason is None:
        assert found is None
    else:
        assert reason in found


@pytest.mark.parametrize(
    "wrong", [{"warpgroups": 3}, {"scan_columns": 24}, {"scan_stages": 0}], ids=str
)
def test_config_is_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MosaicConfig(**wrong)
