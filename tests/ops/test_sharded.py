"""The operator split over eight devices equals the operator on one, gradients too."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from nha_jax import native_hybrid_attention
from nha_jax.ops.sharded import OperatorAxes, sharded_native_hybrid_attention
from tests.ops import oracle
from tests.ops.cases import Case
from tests.ops.operator_suite import assert_close, cotangent

# Segments that end inside a device's part, at its edge, span several parts, and padding in all
# places where it may stand.
PACKED = ((5, 12, -3, 1, 20, 7), (-6, 24, -2, 16))
CASES = {
    "window-3": Case(window=3, T=48),
    "window-0": Case(window=0, T=48),
    "window-longer-than-a-part": Case(window=16, T=48, slot_inputs=True),
    "window-longer-than-all": Case(window=60, T=48),
    "full": Case(window=None, T=48),
    "packed": Case(window=4, T=48, segments=PACKED, slot_inputs=True),
    "packed-window-0": Case(window=0, T=48, segments=PACKED),
    "packed-long-window": Case(window=13, T=48, segments=PACKED),
    "packed-full": Case(window=None, T=48, segments=PACKED),
    "sink": Case(window=7, T=48, segments=PACKED, empty_slots="sink", scale=0.3),
    "hard-gates": Case(window=2, T=48, hard_gates=True),
    "no-slots": Case(window=5, T=48, M=0),
}


def mesh_axes(batch: int, length: int, heads: int) -> OperatorAxes:
    devices = np.array(jax.devices()[: batch * length * heads]).reshape(batch, length, heads)
    mesh = Mesh(devices, ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return OperatorAxes(mesh, ("data",), "context", ("tensor",))


def call(arrays: Any, case: Case, window: Any, axes: OperatorAxes | None) -> Any:
    function: Any = native_hybrid_attention
    if axes is not None:
        function = functools.partial(sharded_native_hybrid_attention, axes=axes)
    return function(**arrays, **case.options(), window=window, return_slot_share=True)


def gradients(case: Case, axes: OperatorAxes | None) -> Any:
    def loss(arrays: Any) -> jax.Array:
        out, share = call(arrays, case, case.window, axes)
        return jnp.sum(out * cotangent(out.shape)) + jnp.sum(share * cotangent(share.shape))

    return jax.jit(jax.grad(loss))(case.arrays())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, (1, 4, 2)) for name in CASES),
        ("packed-long-window", (1, 8, 1)),
        ("packed-full", (1, 8, 1)),
        ("packed", (2, 3, 1)),
    ],
    ids=str,
)
def test_outputs(name: str, sizes: tuple[int, int, int]) -> None:
    case = CASES[name]
    arrays = case.arrays()
    expected = oracle.evaluate(**arrays, **case.options(), window=case.window)
    axes = mesh_axes(*sizes)
    out, share = jax.jit(lambda arrays: call(arrays, case, case.window, axes))(arrays)
    assert_close(out, expected.out, 1e-5)
    assert_close(share, expected.slot_share, 1e-5)


@pytest.mark.parametrize("name", ["packed-long-window", "packed-full", "sink", "hard-gates"])
def test_gradients(name: str) -> None:
    case = CASES[name]
    found, expected = gradients(case, mesh_axes(1, 4, 2)), gradients(case, None)
    for argument, gradient in expected.items():
        assert_close(found[argument], gradient, 1e-5)


def test_traced_window() -> None:
    case = CASES["packed"]
    arrays = case.arrays()
    axes = mesh_axes(1, 4, 2)
    run = jax.jit(lambda window: call(arrays, case, window, axes))
    for window in (0, 4, 48):
        out, share = run(jnp.int32(window))
        expected = oracle.evaluate(**arrays, **case.options(), window=window)
        assert_close(out, expected.out, 1e-5)
        assert_close(share, expected.slot_share, 1e-5)


def test_sizes_that_are_not_divided_are_named() -> None:
    case = Case(window=4, T=45)
    with pytest.raises(
        ValueError, match=re.escape("B=2 and T=45 and key K=2, but the mesh splits")
    ):
        call(case.arrays(), case, 4, mesh_axes(1, 8, 1))
