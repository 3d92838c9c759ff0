"""Running stacked layers: parameters stored [L, ...], regrouped where they are applied.

Parameters are made once, by one scan over all layers, and do not depend on the windows. Applying
them to static windows compiles each distinct window of the repeating block once:

    windows 64 64 64 full 64 64 64 full   ->   one group: 2 repeats of the runs (64 x 3), (full x 1)

The outer scan walks over repeats, an inner scan over the layers of a run, so that a windowed layer
costs what a windowed layer costs, and compile time grows with the number of runs, not of layers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from nha_jax.ops.windows import Window

# Called as (layer, x, window, state, prevent_cse) -> (x, outputs of the layer).
ApplyLayer = Callable[..., tuple[jax.Array, Any]]

_SCAN: dict[str, Any] = {
    "variable_axes": {"params": 0},
    "split_rngs": {"params": True},
    "metadata_params": {nn.PARTITION_NAME: "layers"},
}


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive layers of one window."""

    window: Window
    length: int


@dataclasses.dataclass(frozen=True)
class Group:
    """A block of runs that is repeated."""

    repeats: int
    runs: tuple[Run, ...]

    @property
    def block(self) -> int:
        """Layers in one repeat."""
        return sum(run.length for run in self.runs)


def plan_layers(windows: Sequence[Window]) -> tuple[Group, ...]:
    """Groups layers so that as few layer bodies as possible are compiled.

    The plan is a repeated block of layers and, where it does not come out even, the runs of the
    layers that remain. Without a period it is the runs of equal layers.

    Args:
        windows: one window a layer.

    Returns:
        One or two groups that cover the layers in order.
    """
    total = len(windows)
    best: tuple[Group, ...] = (Group(1, _runs(windows)),)
    for block in range(1, total // 2 + 1):
        repeats = 1
        while windows[repeats * block : (repeats + 1) * block] == windows[:block]:
            repeats += 1
        if repeats == 1:
            continue
        plan: tuple[Group, ...] = (Group(repeats, _runs(windows[:block])),)
        if repeats * block < total:
            plan += (Group(1, _runs(windows[repeats * block :])),)
        if _bodies(plan) < _bodies(best):
            best = plan
    return best


def _bodies(plan: Sequence[Group]) -> int:
    return sum(len(group.runs) for group in plan)


def _runs(windows: Sequence[Window]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for window in windows:
        if runs and runs[-1].window == window:
            runs[-1] = Run(window, runs[-1].length + 1)
        else:
            runs.append(Run(window, 1))
    return tuple(runs)


def scan_layers(
    layer: nn.Module,
    x: Float[Array, "B T D"],
    windows: Int32[Array, " L"],
    apply_layer: ApplyLayer,
) -> tuple[jax.Array, Any]:
    """One scan over all layers with their windows as data; makes the parameters at initialisation.

    Returns:
        The residual stream after the last layer and the layers' outputs, stacked [L, ...].
    """

    def body(layer: nn.Module, x: jax.Array, window: jax.Array) -> tuple[jax.Array, Any]:
        return apply_layer(layer, x, window, None, prevent_cse=False)

    length = windows.shape[0]
    return nn.scan(body, length=length, **_SCAN)(layer, x, windows)


def run_layers(
    layer: nn.Module,
    x: Float[Array, "B T D"],
    windows: Sequence[Window],
    apply_layer: ApplyLayer,
    states: Sequence[Any] | None = None,
) -> tuple[jax.Array, list[Any]]:
    """Applies all layers with static windows, in scans over repeated blocks and runs.

    Args:
        layer: the layer whose parameters are stacked [L, ...].
        x: residual stream.
        windows: one static window a layer.
        apply_layer: applies one layer.
        states: one state a layer, or None.

    Returns:
        The residual stream after the last layer and one pytree of outputs a layer.
    """
    outputs: list[Any] = []
    for group in plan_layers(windows):
        first = len(outputs)
        count = group.repeats * group.block
        members = None if states is None else states[first : first + count]
        x, group_outputs = _run_group(layer, x, group, first, apply_layer, members)
        outputs.extend(group_outputs)
    return x, outputs


def run_layers_unrolled(
    layer: nn.Module,
    x: Float[Array, "B T D"],
    windows: Sequence[Window],
    apply_layer: ApplyLayer,
    states: Sequence[Any],
) -> tuple[jax.Array, list[Any]]:
    """Applies all layers one by one, as single-token decoding wants it.

    A scan would copy every layer's state in and out; here a donated state is updated in place.
    """
    outputs: list[Any] = []
    for index, (window, state) in enumerate(zip(windows, states, strict=True)):
        group = Group(1, (Run(window, 1),))
        x, group_outputs = _run_group(layer, x, group, index, apply_layer, [state])
        outputs.extend(group_outputs)
    return x, outputs


def _run_group(
    layer: nn.Module,
    x: jax.Array,
    group: Group,
    first: int,
    apply_layer: ApplyLayer,
    states: Sequence[Any] | None,
) -> tuple[jax.Array, list[Any]]:
    """Applies the layers from `first` on that `group` describes."""
    repeats, block = group.repeats, group.block
    starts = [sum(run.length for run in group.runs[:index]) for index in range(len(group.runs))]
    # States of a run stand stacked [repeats, run length, ...], as the scans consume them.
    stacked: tuple[Any, ...] = (None,) * len(group.runs)
    if states is not None:
        stacked = tuple(
            _stack(
                [
                    states[repeat * block + start + offset]
                    for repeat in range(repeats)
                    for offset in range(run.length)
                ],
                (repeats, run.length),
            )
            for start, run in zip(starts, group.runs, strict=True)
        )

    def one_block(
        layer: nn.Module, x: jax.Array, stacked: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        outputs = []
        for start, run, run_states in zip(starts, group.runs, stacked, strict=True):
            x, output = _apply_run(
                layer, x, run, start, apply_layer, run_states, in_loop=repeats > 1
            )
            outputs.append(output)
        return x, tuple(outputs)

    def regroup(p: jax.Array) -> jax.Array:
        p = p[first : first + repeats * block]
        return p.reshape(repeats, block, *p.shape[1:]) if repeats > 1 else p

    if repeats > 1:
        whole = nn.scan(one_block, length=repeats, **_SCAN)
        x, outputs = _with_params(whole, regroup)(layer, x, stacked)
    else:
        stacked = jax.tree.map(lambda s: s[0], stacked)
        x, outputs = _with_params(one_block, regroup)(layer, x, stacked)
        outputs = jax.tree.map(lambda o: o[None], outputs)
    return x, [
        jax.tree.map(lambda o, r=repeat, j=offset: o[r, j], output)
        for repeat in range(repeats)
        for run, output in zip(group.runs, outputs, strict=True)
        for offset in range(run.length)
    ]


def _apply_run(
    layer: nn.Module,
    x: jax.Array,
    run: Run,
    start: int,
    apply_layer: ApplyLayer,
    states: Any,
    *,
    in_loop: bool,
) -> tuple[jax.Array, Any]:
    """Applies the layers of one run, which stand in the block's parameters from `start` on.

    Returns:
        The residual stream and the outputs, stacked [run length, ...].
    """
    if run.length == 1:

        def single(layer: nn.Module, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            # Outside a loop XLA would merge the recomputation with the first computation.
            return apply_layer(layer, x, run.window, state, prevent_cse=not in_loop)

        state = jax.tree.map(lambda s: s[0], states)
        x, output = _with_params(single, lambda p: p[start])(layer, x, state)
        return x, jax.tree.map(lambda o: o[None], output)

    def body(layer: nn.Module, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return apply_layer(layer, x, run.window, state, prevent_cse=False)

    scanned = nn.scan(body, length=run.length, **_SCAN)
    return _with_params(scanned, lambda p: p[start : start + run.length])(layer, x, states)


def _with_params(
    target: Callable[..., Any], transform: Callable[[jax.Array], jax.Array]
) -> Callable[..., Any]:
    """`target` with every parameter of its module passed through `transform`.

    Partitioning metadata is dropped: its names do not fit the new axes, and the stored
    parameters have their sharding already.
    """

    def trans_in(variables: Any) -> Any:
        return jax.tree.map(transform, nn.meta.unbox(variables))

    return nn.map_variables(target, "params", trans_in_fn=trans_in)


def _stack(trees: Sequence[Any], leading: tuple[int, ...]) -> Any:
    """Stacks equal pytrees into one with the axes `leading` in front."""

    def stack(*leaves: jax.Array) -> jax.Array:
        stacked = jnp.stack(leaves)
        return stacked.reshape(*leading, *stacked.shape[1:])

    return jax.tree.map(stack, *trees)
