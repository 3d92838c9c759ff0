"""Rotary position embedding: float32 tables, scaling rules, and the half-split rotation.

The window path of the operator is rotated, the slots are not (DESIGN: "slots carry no
position"). Angles are float32 whatever the compute type: bfloat16 angles alias beyond a
few hundred positions.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the length a model was trained at.

    Attributes:
        kind: "linear" divides every frequency by `factor`; "llama3" divides the low ones,
            keeps the high ones and blends between (Llama 3.1's rule).
        factor: The stretch, at least 1.
        low_freq_factor: "llama3" only: wavelengths above `original_max_position /
            low_freq_factor` tokens are divided by `factor`.
        high_freq_factor: "llama3" only: wavelengths below `original_max_position /
            high_freq_factor` tokens are kept.
        original_max_position: "llama3" only: the context length of pretraining, in tokens.

    Raises:
        ValueError: for an unknown kind or factors out of order.
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise ValueError(
                f"rotary_scaling.kind must be 'linear' or 'llama3', but was {self.kind!r}."
            )
        if not self.factor >= 1.0:
            raise ValueError(f"rotary_scaling.factor must be at least 1, but was {self.factor}.")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rotary_scaling needs 0 < low_freq_factor < high_freq_factor, but found "
                f"{self.low_freq_factor} and {self.high_freq_factor}."
            )
        if self.original_max_position < 1:
            raise ValueError(
                "rotary_scaling.original_max_position must be at least 1, but was "
                f"{self.original_max_position}."
            )


def rotary_frequencies(
    key_width: int, *, theta: float = 10000.0, scaling: RotaryScaling | None = None
) -> Float[Array, "H/2"]:
    """Angular frequencies in radians per token, float32, highest first.

    Args:
        key_width: Width H of a key head; even.
        theta: Base of the geometric progression.
        scaling: Optional stretch for longer contexts.

    Raises:
        ValueError: if `key_width` is not a positive even number or `theta` is not positive.
    """
    if key_width < 2 or key_width % 2:
        raise ValueError(f"rotary needs an even key width of at least 2, but found {key_width}.")
    if not theta > 0:
        raise ValueError(f"rotary theta must be positive, but was {theta}.")
    exponent = jnp.arange(0, key_width, 2, dtype=jnp.float32) / key_width
    frequencies = 1.0 / (theta**exponent)
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    wavelength = 2.0 * math.pi / frequencies
    # 0 at the long-wavelength end (stretch fully), 1 at the short end (keep).
    keep = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * stretched


def rotary_tables(
    positions: Int[Array, "*shape"],
    key_width: int,
    *,
    theta: float = 10000.0,
    scaling: RotaryScaling | None = None,
) -> tuple[Float[Array, "*shape H/2"], Float[Array, "*shape H/2"]]:
    """Cosines and sines of the rotation angles, float32.

    Args:
        positions: Token positions inside their segment, any shape, integers.
        key_width: Width H of a key head.
        theta: Base of the frequencies.
        scaling: Optional stretch for longer contexts.

    Returns:
        (cos, sin), each of shape positions.shape + (H/2,).
    """
    frequencies = rotary_frequencies(key_width, theta=theta, scaling=scaling)
    positions = jnp.asarray(positions, jnp.float32)[..., None]
    angles = positions * jnp.expand_dims(frequencies, tuple(range(positions.ndim - 1)))
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "B T heads H"],
    cos: Float[Array, "*B T H/2"],
    sin: Float[Array, "*B T H/2"],
) -> Float[Array, "B T heads H"]:
    """Rotates each head; the first half of the width pairs with the second ("half-split").

    Computed in float32 (float64 for float64 inputs) and rounded once to the dtype of `x`, so
    that a key in a decoding state is the key that a whole pass would use.

    Args:
        x: Queries or keys.
        cos: Cosines, [T, H/2] for all sequences or [B, T, H/2].
        sin: Sines, of the same shape.
    """
    compute = jnp.promote_types(x.dtype, jnp.float32)
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    cos, sin = (jax.lax.convert_element_type(a, compute)[:, :, None, :] for a in (cos, sin))
    first, second = jnp.split(x.astype(compute), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
