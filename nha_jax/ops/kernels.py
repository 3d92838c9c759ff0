"""The operator on GPU kernels: which family can run, and the glue to either of them.

A family is a package under `pallas` with two functions: `unsupported` says what keeps it from
taking certain sizes, `attention` runs whole sequences. One token is decoded in plain JAX whatever
the implementation. A family is imported when it is asked for, never before, so that the library
works where no GPU stack is installed.
"""

import dataclasses
import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nha_jax.ops.history import (
    final_state,
    initial_slots,
    poison_beyond_capacity,
    reads_slots,
    with_history,
)
from nha_jax.ops.inputs import OperatorInputs
from nha_jax.ops.segments import segment_layout
from nha_jax.ops.state import NHAState


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of kernels.

    Attributes:
        name: What the operator's argument `implementation` calls it.
        module: The package it is imported from.
        needs: Packages it cannot be imported without.
        capabilities: The CUDA compute capabilities it runs on.
        hardware: What GPUs of those capabilities are called.
    """

    name: str
    module: str
    needs: tuple[str, ...]
    capabilities: tuple[str, ...]
    hardware: str


FAMILIES = {
    # Warpgroup matrix instructions (wgmma) exist on sm_90a and nowhere else.
    "pallas": Family("pallas", "pallas.mosaic", (), ("9.0",), "Hopper"),
    # The tiles take up to 227 KB of shared memory, which other generations' SMs do not have.
    "triton": Family(
        "triton",
        "pallas.triton",
        ("triton", "jax_triton"),
        ("9.0", "10.0", "10.3"),
        "Hopper or data-center Blackwell",
    ),
}
# The order in which `implementation=None` looks for one that can run, by what was measured on an
# H200 (`benchmarks/`): there both passed the operator's suite and a training run beside `xla`.
PREFERRED: tuple[str, ...] = ("triton", "pallas")


def load(name: str) -> ModuleType:
    """The family's package.

    Raises:
        ImportError: if it, or what it needs, cannot be imported; the message says what.
    """
    family = FAMILIES[name]
    if importlib.util.find_spec("pallas") is None:
        raise ImportError("the package `pallas` with the GPU kernels is not installed")
    if importlib.util.find_spec(family.module) is None:
        raise ImportError(f"this version has no {name} kernels yet")
    for package in family.needs:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"the {name} kernels need the package {package}, not installed here")
        try:
            importlib.import_module(package)
        except Exception as error:  # a release that does not fit the others fails in many ways
            raise ImportError(
                f"the {name} kernels need {package}, whose import fails with "
                f"{type(error).__name__}: {error}"
            ) from error
    return importlib.import_module(family.module)


def device_problem(name: str) -> str | None:
    """Why the default device cannot run a family; None where it can."""
    family = FAMILIES[name]
    needed = f"the {name} kernels need an NVIDIA GPU of the {family.hardware} generation"
    if jax.default_backend() != "gpu":
        return f"{needed}, but JAX's default backend is {jax.default_backend()}"
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", ""))
    if found not in family.capabilities:
        valid = " or ".join(family.capabilities)
        return f"{needed} (compute capability {valid}), but {device.device_kind} has {found!r}"
    return None


@functools.cache
def _import_problem(name: str) -> str | None:
    try:
        load(name)
    except ImportError as error:
        return str(error)
    return None


def missing(name: str) -> str | None:
    """Why a family cannot run here, whatever the inputs; None where it can."""
    return _import_problem(name) or device_problem(name)


def unsupported(name: str, inputs: OperatorInputs) -> str | None:
    """Why a family cannot run these inputs here; None where it can."""
    return missing(name) or load(name).unsupported(
        dtype=inputs.query.dtype,
        num_heads=inputs.query.shape[2],
        num_kv_heads=inputs.key.shape[2],
        key_width=inputs.key.shape[3],
        value_width=inputs.value.shape[3],
        num_slots=inputs.log_gate.shape[3],
    )


def choose(inputs: OperatorInputs) -> str | None:
    """The family that `implementation=None` takes for these inputs; None for plain JAX.

    Only 16-bit inputs have been measured against plain JAX: in float32 the kernels' products do not
    run on tensor cores, and are taken by name only.
    """
    if jnp.finfo(inputs.query.dtype).bits != 16:
        return None
    return next((name for name in PREFERRED if unsupported(name, inputs) is None), None)


def run(
    name: str, inputs: OperatorInputs, *, return_state: bool
) -> tuple[Float[Array, "B T N V"], NHAState | None, Float[Array, "B T N"]]:
    """Runs the operator on the kernels of one family.

    Returns:
        (output, state after the last token, slot share). The state is None where it was not
        asked for or the window is traced.
    """
    layout = segment_layout(inputs.segment_ids, inputs.state)
    joined = with_history(inputs)
    dtype = inputs.query.dtype
    query, slot_query, scale = _static_scale(inputs)
    writes_slots = inputs.window is not None and inputs.log_gate.shape[-1] > 0
    state_asked = return_state and inputs.window_is_static
    out, slot_share, slots = load(name).attention(
        query,
        joined("key", dtype),
        joined("value", dtype),
        joined("log_gate", jnp.float32),
        slot_query,
        joined("slot_key", dtype),
        jnp.where(layout.is_token, layout.number, -1),
        None if inputs.state is None else initial_slots(inputs, jnp.float32),
        window=inputs.window,
        scale=scale,
        sink=inputs.sink,
        with_slots=state_asked and writes_slots,
        use_slots=reads_slots(inputs),
    )
    out = poison_beyond_capacity(inputs, layout, out)
    state = final_state(inputs, layout, joined, slots) if state_asked else None
    return out, state, slot_share


def _static_scale(inputs: OperatorInputs) -> tuple[Array, Array, float]:
    """Queries and a static scale; a scale that is an array is multiplied into the queries."""
    scale: Any = inputs.scale
    if isinstance(scale, int | float):
        return inputs.query, inputs.slot_query, float(scale)

    def scaled(x: Array) -> Array:
        return (x.astype(inputs.accumulator_dtype) * scale).astype(x.dtype)

    return scaled(inputs.query), scaled(inputs.slot_query), 1.0
