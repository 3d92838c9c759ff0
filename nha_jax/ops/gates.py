"""Retention and write strength of a gate."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_jvp
def write_strength(log_gate: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """S = 1 - exp(g), accurate near g = 0.

    The derivative is -exp(g). JAX differentiates `expm1` as its result plus one, which has lost
    all digits once exp(g) is small beside 1 (g below about -15 in float32).
    """
    return -jnp.expm1(log_gate)


@write_strength.defjvp
def _write_strength_jvp(primals, tangents):
    (log_gate,), (tangent,) = primals, tangents
    return write_strength(log_gate), -jnp.exp(log_gate) * tangent
