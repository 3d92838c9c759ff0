"""Windows drawn for every step and layer: by step and seed, as data, in the right layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.configuration import ConfigurationError, from_mapping, to_mapping
from nha_jax.ops.windows import FULL
from nha_jax.training.config import RunConfig, check_resumable
from nha_jax.training.program import build_program
from nha_jax.training.sharding import make_mesh, put_batch
from nha_jax.training.step import accumulate_gradients, make_window_draw
from tests.training.tiny import packed_batch, tiny_config

CHANGES = {"model.num_layers": 3, "train.random_windows": "2,5,full"}
BYTE_LENGTHS = jnp.asarray([1] * 256 + [0] * 4, jnp.int32)


def test_draws_depend_on_step_and_seed_and_are_fair() -> None:
    draw = jax.jit(make_window_draw((2, 5, None), 4, seed=7))
    drawn = np.asarray([draw(step) for step in range(300)])
    np.testing.assert_array_equal(drawn[17], draw(17))
    other = jax.jit(make_window_draw((2, 5, None), 4, seed=8))
    assert np.any(drawn[:20] != [other(step) for step in range(20)])
    for layer in range(4):
        counts = [np.sum(drawn[:, layer] == window) for window in (2, 5, FULL)]
        assert sum(counts) == 300
        assert min(counts) > 60
        # Layers are drawn by themselves: they agree in a third of the steps.
        agree = np.mean(drawn[:, layer] == drawn[:, (layer + 1) % 4])
        assert 0.2 < agree < 0.5


def test_a_step_takes_the_windows_it_reports_and_all_steps_are_one_program() -> None:
    config = tiny_config(**CHANGES)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    seen, losses = [], []
    with jax.set_mesh(mesh):
        program = build_program(config, mesh, np.ones(256, np.int32))
        batch = put_batch(packed_batch(config), program.batch_sharding)
        state = program.init()
        compute = jax.jit(
            lambda params, windows: accumulate_gradients(
                program.model, params, batch, BYTE_LENGTHS, windows=windows
            )[1]
        )
        for step in range(4):
            windows = make_window_draw((2, 5, None), 3, config.train.seed)(jnp.int32(step))
            sums = compute(state.params, windows)
            state, metrics = program.train_step(state, batch)
            seen.append(np.asarray(metrics["windows"]))
            losses.append(float(metrics["loss"]))
            np.testing.assert_array_equal(seen[-1], windows)
            np.testing.assert_allclose(losses[-1], sums["nats"] / sums["targets"], rtol=1e-5)
        assert program.train_step._cache_size() == 1
    assert len({tuple(windows) for windows in seen}) > 1


@pytest.mark.parametrize(
    ("given", "kept", "choices"),
    [
        (None, None, ()),
        ("16, 64,full", "16,64,full", (16, 64, None)),
        ([16, "full", 16], "16,full", (16, None)),
        (8, "8", (8,)),
    ],
)
def test_choices_are_kept_in_one_form(given, kept, choices) -> None:
    config = tiny_config(**{"train.random_windows": given})
    assert config.train.random_windows == kept
    assert config.train.window_choices == choices
    again = from_mapping(RunConfig, to_mapping(config))
    assert again.train.random_windows == kept


def test_a_wrong_choice_is_named_and_a_changed_one_is_told() -> None:
    with pytest.raises(ConfigurationError, match="random_windows: A window is '16x'"):
        tiny_config(**{"train.random_windows": "16x,full"})
    old, new = (to_mapping(tiny_config(**{"train.random_windows": w})) for w in (None, "4,full"))
    (note,) = check_resumable(old, new, "run")
    assert "random_windows is now '4,full', was None." in note
