"""The mesh, what is refused, and eight devices against one."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nha_jax.configuration import ConfigurationError
from nha_jax.training.program import Program, build_program
from nha_jax.training.sharding import (
    MeshConfig,
    check_divisible,
    logical_axis_rules,
    make_mesh,
    mesh_sizes,
    put_batch,
)
from nha_jax.training.step import TrainState
from tests.training.tiny import packed_batch, tiny_config

STEPS = 3
BYTE_LENGTHS = np.ones(260, np.int32)


@pytest.mark.parametrize(
    ("config", "devices", "sizes"),
    [
        (MeshConfig(), 8, (8, 1, 1, 1)),
        (MeshConfig(), 1, (1, 1, 1, 1)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), 8, (2, 2, 1, 2)),
        (MeshConfig(data=1, fsdp=2, tensor=4), 8, (1, 2, 1, 4)),
        (MeshConfig(data=1, context=-1), 8, (1, 1, 8, 1)),
    ],
)
def test_one_axis_takes_the_rest(config: MeshConfig, devices: int, sizes: tuple[int, ...]) -> None:
    assert mesh_sizes(config, devices) == sizes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MeshConfig(data=3),
            "data=3 x fsdp=1 x context=1 x tensor=1, which needs 3 devices, but 8",
        ),
        (MeshConfig(tensor=3), "the 8 devices found cannot be divided by 3"),
        (MeshConfig(data=16, fsdp=1), "needs 16 devices, but 8 were found"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_one_clear_error(
    config: MeshConfig, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        mesh_sizes(config, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"data": 0}, "data must be 1 or more"), ({"data": -1, "tensor": -1}, "at most one")],
)
def test_bad_sizes_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshConfig(**fields)


@pytest.mark.parametrize(
    ("mesh", "batch_size", "microbatches", "message"),
    [
        (MeshConfig(data=2, tensor=4), 8, 1, "model.num_kv_heads is 2, .* tensor (4)"),
        (MeshConfig(data=1, fsdp=8), 8, 2, "train.microbatches is 4, .* data * fsdp (8)"),
        (MeshConfig(), 9, 1, "data.batch_size / train.microbatches is 9"),
        (MeshConfig(data=1, context=8), 8, 1, "data.sequence_length is 18, .* context (8)"),
        (
            MeshConfig(data=8),
            8,
            3,
            "config.data.batch_size is 8, which config.train.microbatches (3)",
        ),
    ],
)
def test_what_the_mesh_does_not_divide_is_named(
    mesh: MeshConfig, batch_size: int, microbatches: int, message: str
) -> None:
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(ConfigurationError, match=pattern):
        check_divisible(make_mesh(mesh), tiny_config().model, batch_size, microbatches, 18)


def test_a_vocabulary_that_cannot_be_split_is_kept_whole() -> None:
    mesh = make_mesh(MeshConfig(tensor=2))
    for vocab_size, axis in ((260, "tensor"), (259, None)):
        config = tiny_config(**{"model.vocab_size": vocab_size})
        assert dict(logical_axis_rules(mesh, config.model))["vocab"] == axis


def _train(
    program: Program, batches: list[dict[str, np.ndarray]]
) -> tuple[TrainState, list[dict[str, Any]]]:
    with jax.set_mesh(program.mesh):
        state = program.init()
        history = []
        for batch in batches:
            state, metrics = program.train_step(state, put_batch(batch, program.batch_sharding))
            history.append(jax.device_get(metrics))
        return jax.device_get(state), history


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (MeshConfig(data=2, fsdp=2, tensor=2), {"train.microbatches": 2}),
        (
            MeshConfig(data=1, fsdp=2, context=2, tensor=2),
            {"model.num_layers": 2, "model.windows": "10,full@1", "model.conv_width": 3},
        ),
    ],
    ids=["data, fsdp, tensor", "fsdp, context, tensor"],
)
def test_eight_devices_train_like_one(mesh: MeshConfig, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    batches = [packed_batch(config, seed) for seed in range(STEPS)]
    one = build_program(config, make_mesh(config.mesh, jax.devices()[:1]), BYTE_LENGTHS)
    expected, expected_history = _train(one, batches)

    eight = build_program(config, make_mesh(mesh), BYTE_LENGTHS)
    found, history = _train(eight, batches)

    for here, there in zip(history, expected_history, strict=True):
        for name in ("loss", "gradient_norm", "slot_share"):
            np.testing.assert_allclose(here[name], there[name], rtol=1e-5, err_msg=name)
    for (path, here), there in zip(
        jax.tree_util.tree_leaves_with_path(found.params),
        jax.tree.leaves(expected.params),
        strict=True,
    ):
        error = np.linalg.norm(here - there) / np.linalg.norm(there)
        assert error < 1e-5, jax.tree_util.keystr(path)

    # Parameters and moments are split, not copied.
    params = eight.abstract_state.params
    query = params["layers"]["attention"]["query"]["kernel"]
    down = params["layers"]["feed_forward"]["down"]["kernel"]
    assert query.sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert down.sharding.spec == PartitionSpec(None, "tensor", "fsdp")
    assert params["embed"].sharding.spec == PartitionSpec("tensor", "fsdp")
    moments = [
        leaf
        for leaf in jax.tree.leaves(eight.abstract_state.opt_state)
        if leaf.shape == query.shape
    ]
    assert len(moments) == 2
    assert {leaf.sharding.spec for leaf in moments} == {query.sharding.spec}


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=1, fsdp=2, context=4), MeshConfig(data=4, tensor=2)],
    ids=["context", "tensor"],
)
def test_no_activation_is_gathered_around_the_operator(mesh: MeshConfig) -> None:
    # Sizes that no parameter has, so that a gathered activation is told by its shape.
    config = tiny_config(**{"data.sequence_length": 40, "data.batch_size": 24, "mesh.data": -1})
    program = build_program(config, make_mesh(mesh), BYTE_LENGTHS)
    batch = jax.eval_shape(lambda: packed_batch(config))
    with jax.set_mesh(program.mesh):
        step = program.train_step.lower(program.abstract_state, batch)  # type: ignore[attr-defined]
        text = step.compile().as_text()
    sizes = {40, 24, 40 // mesh.context, 24 // (mesh.data * mesh.fsdp)}
    gathered = re.findall(r"= \(?(bf16|f32)\[([\d,]+)\][^=]*? all-gather(?:-start)?\(", text)
    assert not [shape for _, shape in gathered if sizes & set(map(int, shape.split(",")))]
    # The text is read rightly: what is exchanged is there, under the names looked for.
    assert bool(gathered) == (mesh.fsdp > 1)
    assert ("collective-permute" in text) == (mesh.context > 1)
