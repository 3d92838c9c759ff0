"""Traces of a model's memories are those of the operator, in the right layer, head and place."""

import dataclasses

import jax
import numpy as np
import pytest

from nha_jax.inference.memories import look_at_memories, state_bytes
from nha_jax.inference.plots import plot_slot_share
from nha_jax.models.language_model import NHALanguageModel
from nha_jax.ops.windows import windows_array
from tests.inference.small import MIXED, params_of, prompts_of

CONFIG = dataclasses.replace(
    MIXED, num_layers=3, windows="0,5@1,full@2", conv_width=0, qk_norm=False
)
MODEL = NHALanguageModel(CONFIG)
TOKENS = np.asarray(prompts_of([12, 12]), np.int32)


@pytest.fixture(scope="module")
def traced():
    """Statistics and traces, with static windows and with windows as data."""
    found = {}
    for name, windows in (("static", None), ("data", windows_array(CONFIG.layer_windows))):
        run = jax.jit(
            lambda p, w=windows: MODEL.apply(
                {"params": p}, TOKENS, windows=w, return_traces=True, return_statistics=True
            )
        )
        found[name] = run(params_of(CONFIG))[1:]
    return found


def test_traces_have_the_statistics_as_their_means(traced):
    for statistics, traces in traced.values():
        assert traces["slot_share"].shape == (3, 2, 12, 4)
        assert traces["log_gate"].shape == (3, 2, 12, 2, 3)
        np.testing.assert_allclose(
            traces["slot_share"].mean(axis=(1, 2, 3)), statistics["slot_share"], atol=1e-6
        )
        np.testing.assert_allclose(
            traces["log_gate"].mean(axis=(1, 2, 3, 4)), statistics["log_gate_mean"], rtol=1e-5
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), traced["data"], traced["static"]
    )


def test_what_is_seen_of_a_text(traced, tmp_path):
    memories = look_at_memories(MODEL, params_of(CONFIG), TOKENS[1])
    share = memories.slot_share
    _, traces = traced["static"]
    np.testing.assert_allclose(share, traces["slot_share"][:, 1].transpose(0, 2, 1), atol=1e-6)
    # Window 0 reads nothing but slots, full attention never reads them, and a window of 5 tokens
    # does from the sixth on.
    np.testing.assert_allclose(share[0], 1, atol=1e-6)
    np.testing.assert_array_equal(share[2], 0)
    np.testing.assert_array_equal(share[1, :, :5], 0)
    assert np.all((share[1, :, 5:] > 0) & (share[1, :, 5:] < 1))
    assert memories.half_life.shape == (3, 2, 3)
    kept = np.exp(np.asarray(traces["log_gate"][1, 1, :, 1, 2], np.float64).mean())
    np.testing.assert_allclose(kept ** memories.half_life[1, 1, 2], 0.5, rtol=1e-4)
    plot_slot_share(tmp_path / "share.png", share, ["0", "5", "full"])
    assert (tmp_path / "share.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one"):
        look_at_memories(MODEL, params_of(CONFIG), np.asarray([], np.int32))


def test_bytes_of_states_are_those_of_the_arrays():
    sizes, full = state_bytes(MODEL, 1000)
    state = MODEL.init_state(1, capacity=1000)
    assert sizes == [sum(leaf.nbytes for leaf in jax.tree.leaves(layer)) for layer in state.layers]
    assert sizes[2] == full[0] == full[2]
    assert max(sizes[:2]) < full[0] / 20
