"""AdamW's decay mask, the schedule, the clip and the moments' dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nha_jax.models.language_model import NHALanguageModel
from nha_jax.training.optimizer import (
    OptimizerConfig,
    decay_mask,
    learning_rate_schedule,
    make_optimizer,
)
from nha_jax.training.step import unbox
from tests.training.tiny import tiny_config

MATRICES = {
    "attention/gate/kernel",
    "attention/key/kernel",
    "attention/output/kernel",
    "attention/query/kernel",
    "attention/value/kernel",
    "feed_forward/down/kernel",
    "feed_forward/gate/kernel",
    "feed_forward/up/kernel",
}


@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("decay_embedding", [True, False])
def test_matrices_decay_and_nothing_else(boxed: bool, decay_embedding: bool) -> None:
    config = tiny_config(
        **{
            "model.qk_norm": True,
            "model.qkv_bias": True,
            "model.output_bias": True,
            "model.gate_bias": True,
            "model.output_norm": True,
            "model.conv_width": 3,
            "model.tie_embeddings": False,
        }
    )
    model = NHALanguageModel(config.model)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    params = params if boxed else unbox(params)
    mask = decay_mask(params, decay_embedding=decay_embedding)
    decayed = {
        "/".join(key.key for key in path if key.key != "layers")
        for path, value in jax.tree_util.tree_leaves_with_path(mask)
        if value
    }
    assert decayed == MATRICES | {"head"} | ({"embed"} if decay_embedding else set())


def test_decay_is_decoupled_and_follows_the_mask() -> None:
    config = OptimizerConfig(peak_learning_rate=0.5, weight_decay=0.1, clip_norm=None)
    optimizer = make_optimizer(config, lambda count: 0.5)
    params = {
        "kernel": jnp.full((2, 3), 4.0),
        "norm": {"scale": jnp.full((2, 3), 4.0)},
        "embed": jnp.full((2, 3), 4.0),
    }
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.5 * 0.1 * 4.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["norm"]["scale"], 0)
    np.testing.assert_array_equal(updates["embed"], 0)


def test_schedule() -> None:
    config = OptimizerConfig(
        peak_learning_rate=2.0, warmup_steps=10, decay_steps=110, final_learning_rate_ratio=0.1
    )
    schedule = learning_rate_schedule(config, train_steps=7)
    expected = {0: 0.0, 5: 1.0, 10: 2.0, 60: 1.1, 110: 0.2, 500: 0.2}
    for step, rate in expected.items():
        np.testing.assert_allclose(schedule(step), rate, rtol=1e-5, atol=1e-7)


def test_schedule_without_warmup_begins_at_the_peak_and_takes_the_steps_of_the_run() -> None:
    config = OptimizerConfig(peak_learning_rate=2.0, final_learning_rate_ratio=0.5)
    schedule = learning_rate_schedule(config, train_steps=100)
    for step, rate in {0: 2.0, 50: 1.5, 100: 1.0}.items():
        np.testing.assert_allclose(schedule(step), rate, rtol=1e-5)


def test_warmup_as_long_as_the_run_is_refused() -> None:
    config = OptimizerConfig(peak_learning_rate=1.0, warmup_steps=10)
    with pytest.raises(ValueError, match=r"optimizer\.warmup_steps must be less than .* 10 steps"):
        learning_rate_schedule(config, train_steps=10)


def test_clip_bounds_the_global_norm() -> None:
    config = OptimizerConfig(
        peak_learning_rate=1.0, clip_norm=1.0, b1=0.0, b2=0.0, epsilon=1e30, weight_decay=0.0
    )
    optimizer = make_optimizer(config, lambda count: 1e30)
    params = {"a_kernel": jnp.ones(3), "b_kernel": jnp.ones(4)}
    # With such an epsilon Adam's update is the gradient itself, scaled by lr / epsilon = 1.
    for gradient, factor in ((10.0, 1.0 / (10.0 * 7**0.5)), (0.1, 1.0)):
        gradients = jax.tree.map(lambda leaf, value=gradient: jnp.full_like(leaf, value), params)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        np.testing.assert_allclose(updates["b_kernel"], -gradient * factor, rtol=1e-5)


def test_moments_have_the_dtypes_asked_for() -> None:
    params = {"kernel": jnp.ones((2, 2), jnp.float32)}
    for mu_dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(peak_learning_rate=1.0, mu_dtype=mu_dtype)
        state = make_optimizer(config, lambda count: 1.0).init(params)
        mu = optax.tree_utils.tree_get(state, "mu")
        nu = optax.tree_utils.tree_get(state, "nu")
        assert mu["kernel"].dtype == mu_dtype
        assert nu["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peak_learning_rate", 0.0),
        ("warmup_steps", -1),
        ("decay_steps", 0),
        ("final_learning_rate_ratio", 1.5),
        ("b2", 1.0),
        ("epsilon", 0.0),
        ("weight_decay", -0.1),
        ("clip_norm", 0.0),
        ("mu_dtype", "float16"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        OptimizerConfig(**{"peak_learning_rate": 1.0, field: value})  # type: ignore[arg-type]
