"""Rotary tables against NumPy float64, scaling rules against their definitions."""

import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.ops.rotary import RotaryScaling, apply_rotary, rotary_frequencies, rotary_tables
from tests.ops import oracle


def test_tables_are_float32_and_right_far_out():
    positions = jnp.array([[0, 1, 700], [8191, 131071, 5]], jnp.int32)
    cos, sin = rotary_tables(positions, 16)
    frequencies = np.asarray(rotary_frequencies(16), np.float64)
    angles = np.asarray(positions)[..., None] * frequencies
    assert cos.dtype == sin.dtype == jnp.float32
    assert cos.shape == (2, 3, 8)
    # The product position * frequency is rounded to float32: half a unit of the angle.
    bound = np.maximum(np.abs(angles), 1) * 2.0**-23
    assert np.all(np.abs(cos - np.cos(angles)) <= bound)
    assert np.all(np.abs(sin - np.sin(angles)) <= bound)
    np.testing.assert_allclose(frequencies, 10000.0 ** (-np.arange(0, 16, 2) / 16), rtol=1e-6)


def test_positions_may_be_of_any_shape():
    cos, _ = rotary_tables(jnp.int32(3), 4)
    assert cos.shape == (2,)


def test_rotation_pairs_the_halves_and_rounds_once():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    cos, sin = rotary_tables(jnp.arange(5), 8)
    expected = oracle.rotate(x.astype(np.float64), cos, sin)
    np.testing.assert_allclose(apply_rotary(jnp.asarray(x), cos, sin), expected, atol=1e-6)
    rounded = jnp.asarray(x, jnp.bfloat16)
    expected = oracle.rotate(np.asarray(rounded, np.float64), cos, sin)
    found = apply_rotary(rounded, cos, sin)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-6)
    batched = jnp.broadcast_to(cos[None], (2, 5, 4)), jnp.broadcast_to(sin[None], (2, 5, 4))
    np.testing.assert_array_equal(apply_rotary(rounded, *batched), found)


def test_linear_scaling_divides_every_frequency():
    plain = rotary_frequencies(8, theta=500.0)
    scaled = rotary_frequencies(8, theta=500.0, scaling=RotaryScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones():
    """Llama 3.1's rule, evaluated frequency by frequency."""
    scaling = RotaryScaling()
    plain = np.asarray(rotary_frequencies(128, theta=500000.0), np.float64)
    scaled = np.asarray(rotary_frequencies(128, theta=500000.0, scaling=scaling))
    expected = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)
    assert scaled[0] == np.float32(plain[0])
    assert np.sum((scaled < plain * 0.999) & (scaled > plain / 8 * 1.001)) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "yarn"}, "kind must be 'linear' or 'llama3', but was 'yarn'"),
        ({"factor": 0.5}, "factor must be at least 1, but was 0.5"),
        ({"low_freq_factor": 4.0}, "needs 0 < low_freq_factor < high_freq_factor"),
        ({"original_max_position": 0}, "original_max_position must be at least 1, but was 0"),
    ],
)
def test_bad_scaling(changes, message):
    with pytest.raises(ValueError, match=message):
        RotaryScaling(**changes)


def test_bad_width_and_theta():
    with pytest.raises(ValueError, match="even key width of at least 2, but found 7"):
        rotary_frequencies(7)
    with pytest.raises(ValueError, match="theta must be positive, but was 0"):
        rotary_frequencies(8, theta=0.0)
