"""Plans for stacked layers: what is compiled once, and that every layer is covered in order."""

import itertools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from nha_jax.models.config import NHAConfig
from nha_jax.models.language_model import NHALanguageModel
from nha_jax.models.layers import Group, Run, plan_layers
from nha_jax.ops.windows import parse_windows


def _expand(plan):
    return tuple(
        run.window
        for group in plan
        for _ in range(group.repeats)
        for run in group.runs
        for _ in range(run.length)
    )


@pytest.mark.parametrize(
    ("spec", "num_layers", "plan"),
    [
        ("64", 24, (Group(1, (Run(64, 24),)),)),
        ("32,full@7,15,23", 24, (Group(3, (Run(32, 7), Run(None, 1))),)),
        ("64,full@3,11,19,27", 32, (Group(4, (Run(64, 3), Run(None, 1), Run(64, 4))),)),
        # A period that does not come out even leaves a run.
        ("32,full@2,5", 8, (Group(2, (Run(32, 2), Run(None, 1))), Group(1, (Run(32, 2),)))),
        # No period: runs of equal layers.
        ("8,64@4,5,6,full@7", 8, (Group(1, (Run(8, 4), Run(64, 3), Run(None, 1))),)),
        ("8,full@1,3", 4, (Group(2, (Run(8, 1), Run(None, 1))),)),
        ("8", 1, (Group(1, (Run(8, 1),)),)),
    ],
)
def test_plans(spec, num_layers, plan):
    assert plan_layers(parse_windows(spec, num_layers)) == plan


def test_every_plan_covers_the_layers_in_order():
    rng = np.random.default_rng(0)
    choices = [0, 8, None]
    for _ in range(200):
        windows = tuple(choices[i] for i in rng.integers(0, 3, size=rng.integers(1, 17)))
        plan = plan_layers(windows)
        assert _expand(plan) == windows
        runs = sum(len(group.runs) for group in plan)
        assert runs <= 1 + sum(a != b for a, b in itertools.pairwise(windows))


def _equations(jaxpr) -> int:
    """Equations of a jaxpr, those inside of scans and calls included."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for parameter in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                total += _equations(getattr(parameter, "jaxpr", parameter))
    return total


def _is_jaxpr(x) -> bool:
    return isinstance(x, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)


def test_the_program_does_not_grow_with_the_number_of_layers():
    """Forward and backward pass of 4 and of 16 layers are programs of one size."""

    def program_size(num_layers, windows):
        config = NHAConfig(
            vocab_size=7,
            num_layers=num_layers,
            width=8,
            num_heads=2,
            num_kv_heads=1,
            key_width=4,
            feed_forward_width=8,
            num_slots=2,
            windows=windows,
            dtype="float32",
            remat="full",
        )
        model = NHALanguageModel(config)
        tokens = jnp.zeros((1, 9), jnp.int32)
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        jaxpr = jax.make_jaxpr(jax.grad(lambda v: jnp.sum(model.apply(v, tokens))))(variables)
        return _equations(jaxpr.jaxpr)

    every_fourth = [program_size(4 * n, ",".join(["3", *_full(n)])) for n in (2, 4)]
    assert every_fourth[0] == every_fourth[1]
    # A program of two bodies, not of eight layers.
    assert every_fourth[0] < 3 * program_size(8, "3")


def _full(repeats):
    return [("full@" if i == 0 else "") + str(4 * i + 3) for i in range(repeats)]
