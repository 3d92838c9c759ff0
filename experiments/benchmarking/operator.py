"""The operator: speed of each implementation, shown only beside numbers that are right.

Each implementation's output and gradients are compared with a float64 evaluation of the definition
(the reference implementation run in float64 on the same rounded inputs) before anything is timed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from experiments.benchmarking import timing
from nha_jax.ops import api

# The largest relative error that counts as right, forward and each gradient (DESIGN section 5).
TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 1e-2), "float16": (1e-3, 3e-3)}

INPUTS = ("query", "key", "value", "log_gate")


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of the operator.

    Attributes:
        batch: Sequences B.
        length: Tokens T.
        num_heads: Query heads N.
        num_kv_heads: Key/value heads K.
        key_width: Width H of a query or key head.
        value_width: Width V of a value head.
        num_slots: Slots M.
        window: Window W in tokens; None for full attention.
        dtype: Dtype of the inputs, a key of `TOLERANCES`.
        seed: Seed of the inputs.
    """

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    num_slots: int
    window: int | None
    dtype: str
    seed: int = 0

    def __str__(self) -> str:
        window = "full" if self.window is None else self.window
        return (
            f"B={self.batch} N={self.num_heads} K={self.num_kv_heads} H={self.key_width} "
            f"V={self.value_width} M={self.num_slots} W={window} {self.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One implementation at one length.

    Attributes:
        implementation: Its name.
        length: Tokens T.
        errors: Relative error by result: "out" and each gradient, "grad query" for example.
        tolerances: The largest error that counts as right, by result.
        seconds: Median time of "forward" and "forward+backward"; None where an error is too large.
    """

    implementation: str
    length: int
    errors: dict[str, float]
    tolerances: dict[str, float]
    seconds: dict[str, float] | None

    def wrong(self) -> dict[str, float]:
        """The errors that are too large; NaN is."""
        return {
            name: error for name, error in self.errors.items() if not error <= self.tolerances[name]
        }


def make_inputs(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs of the operator and a cotangent of its output, in the case's dtype.

    Queries, keys, values and the cotangent are standard normal, log_gate = log_sigmoid(normal) / 8.
    """
    generator = np.random.default_rng(case.seed)
    tokens = (case.batch, case.length)
    shapes = {
        "query": (*tokens, case.num_heads, case.key_width),
        "key": (*tokens, case.num_kv_heads, case.key_width),
        "value": (*tokens, case.num_kv_heads, case.value_width),
        "log_gate": (*tokens, case.num_kv_heads, case.num_slots),
    }
    drawn = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    drawn["log_gate"] = -np.logaddexp(0.0, -drawn["log_gate"]) / 8
    cotangent = generator.standard_normal((*tokens, case.num_heads, case.value_width))
    dtype = jnp.dtype(case.dtype)
    return {name: x.astype(dtype) for name, x in drawn.items()}, cotangent.astype(dtype)


def _forward(
    case: Case, implementation: str
) -> Callable[[dict[str, Array]], Float[Array, "B T N V"]]:
    def forward(inputs: dict[str, Array]) -> Float[Array, "B T N V"]:
        arguments = (inputs[name] for name in INPUTS)
        return api.native_hybrid_attention(
            *arguments, window=case.window, implementation=implementation
        )

    return forward


def _forward_backward(
    case: Case, implementation: str
) -> Callable[[dict[str, Array], Array], tuple[Array, dict[str, Array]]]:
    forward = _forward(case, implementation)

    def forward_backward(
        inputs: dict[str, Array], cotangent: Array
    ) -> tuple[Array, dict[str, Array]]:
        out, pullback = jax.vjp(forward, inputs)
        return out, pullback(cotangent)[0]

    return forward_backward


def _results(out: Any, gradients: dict[str, Any]) -> dict[str, np.ndarray]:
    named = {"out": out} | {f"grad {name}": gradients[name] for name in INPUTS}
    return {name: np.asarray(x, np.float64) for name, x in named.items()}


def judge(case: Case) -> dict[str, np.ndarray]:
    """Output and gradients in float64, computed on the CPU by the reference implementation."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        inputs, cotangent = make_inputs(case)
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in inputs.items()}
        run = jax.jit(_forward_backward(case, "reference"))
        return _results(*run(wide, jnp.asarray(cotangent, jnp.float64)))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected||; the absolute error where `expected` is zero."""
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / (norm if norm > 0 else 1.0))


def measure(
    cases: Sequence[Case], implementations: Sequence[str], *, rounds: int
) -> list[Measurement]:
    """Errors and, where they are small enough, times of each implementation in each case.

    Args:
        cases: The shapes; one for each length.
        implementations: Names for `native_hybrid_attention`.
        rounds: How often each is timed.

    Raises:
        NotImplementedError: if an implementation cannot do a case.
    """
    checked, programs = [], {}
    for case in cases:
        expected = judge(case)
        forward_tolerance, gradient_tolerance = TOLERANCES[case.dtype]
        tolerances = dict.fromkeys(expected, gradient_tolerance) | {"out": forward_tolerance}
        inputs, cotangent = jax.device_put(make_inputs(case))
        for implementation in implementations:
            forward = jax.jit(_forward(case, implementation))
            both = jax.jit(_forward_backward(case, implementation))
            found = _results(*both(inputs, cotangent))
            # The timed forward program is another compilation than the one inside the gradient's.
            found["out"] = np.asarray(forward(inputs), np.float64)
            errors = {name: relative_error(found[name], expected[name]) for name in expected}
            measured = Measurement(implementation, case.length, errors, tolerances, None)
            checked.append(measured)
            if not measured.wrong():
                key = (implementation, case.length)
                programs[*key, "forward"] = functools.partial(forward, inputs)
                programs[*key, "forward+backward"] = functools.partial(both, inputs, cotangent)
    seconds = timing.medians(programs, rounds=rounds)
    return [
        measured
        if measured.wrong()
        else dataclasses.replace(
            measured,
            seconds={
                what: seconds[measured.implementation, measured.length, what]
                for what in ("forward", "forward+backward")
            },
        )
        for measured in checked
    ]


def table(measurements: Sequence[Measurement]) -> list[str]:
    """The measurements as lines; where numbers are wrong there is no speed but what is wrong."""
    head = f"{'implementation':<15}{'T':>8}{'forward':>13}{'fwd+bwd':>13}{'error':>10}"
    lines = [f"{head}{'worst gradient error':>30}"]
    for measured in measurements:
        gradients = {name: error for name, error in measured.errors.items() if name != "out"}
        worst = max(gradients, key=lambda name: np.nan_to_num(gradients[name], nan=np.inf))
        if measured.seconds is None:
            times = f"{'WRONG':>13}{'WRONG':>13}"
        else:
            times = "".join(f"{1e3 * seconds:>10.2f} ms" for seconds in measured.seconds.values())
        lines.append(
            f"{measured.implementation:<15}{measured.length:>8}{times}"
            f"{measured.errors['out']:>10.1e}{f'{gradients[worst]:.1e} ({worst[5:]})':>30}"
        )
    for measured in measurements:
        lines += [
            f"WRONG: {measured.implementation} at T={measured.length}: {name} is off by "
            f"{error:.1e}, which must be at most {measured.tolerances[name]:.0e}."
            for name, error in measured.wrong().items()
        ]
    return lines


def ratios(measurements: Sequence[Measurement]) -> list[str]:
    """How times grow with length, and how the implementations compare, as lines."""
    times = {
        (measured.implementation, measured.length): measured.seconds["forward+backward"]
        for measured in measurements
        if measured.seconds
    }
    implementations = list(dict.fromkeys(measured.implementation for measured in measurements))
    lengths = sorted({measured.length for measured in measurements})
    lines = [
        f"{name}: T={longer} takes {times[name, longer] / times[name, shorter]:.2f} times "
        f"T={shorter}"
        for name in implementations
        for shorter, longer in itertools.pairwise(lengths)
        if {(name, shorter), (name, longer)} <= times.keys()
    ]
    lines += [
        f"T={length}: {name} is {times[first, length] / times[name, length]:.2f} times as fast as "
        f"{first}"
        for first, *others in [implementations]
        for name in others
        for length in lengths
        if {(first, length), (name, length)} <= times.keys()
    ]
    return ["Ratios of forward+backward", *(f"  {line}" for line in lines)] if lines else []
