"""Saving and restoring: what comes back, where to, and what is kept."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from nha_jax.training.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    CheckpointMismatchError,
    load_params,
)
from nha_jax.training.checkpoint_format import committed_steps
from nha_jax.training.integrity import MANIFEST_NAME, read_manifest, verify_files
from tests.training.checkpoint_states import (
    METRIC,
    RUN_CONFIG,
    abstract,
    assert_same,
    boxed,
    names,
    new_iterator,
    new_state,
    save_steps,
    step_folder,
)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_state_data_position_config_and_metrics_come_back_as_one(
    tmp_path: Path, asynchronous: bool
) -> None:
    iterator = new_iterator()
    seen = [next(iterator) for _ in range(3)]
    config = CheckpointConfig(asynchronous=asynchronous)
    with Checkpointer(tmp_path, config) as checkpointer:
        checkpointer.save(
            7,
            new_state(7),
            data_iterator=iterator,
            run_config=RUN_CONFIG,
            metrics={METRIC: float(np.float32(1.5))},
        )
        # The position is that of the call, not that of a later moment.
        after = [next(iterator) for _ in range(5)]
        assert after[0] not in seen
    fresh = new_iterator()
    with Checkpointer(tmp_path, config) as checkpointer:
        restored = checkpointer.restore(abstract(), data_iterator=fresh)
        assert checkpointer.latest_step() == 7
    assert restored is not None
    assert restored.step == 7
    assert restored.run_config == RUN_CONFIG
    assert restored.metrics == {METRIC: 1.5}
    assert_same(restored.state, new_state(7))
    assert [next(fresh) for _ in range(5)] == after


def test_empty_folder_restores_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "new" / "folder", CheckpointConfig()) as checkpointer:
        assert checkpointer.restore(abstract(), data_iterator=new_iterator()) is None
        assert checkpointer.latest_step() is None


def test_every_file_of_a_step_is_in_its_manifest(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    folder = step_folder(tmp_path, 1)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    manifest = read_manifest(folder)
    assert files - {MANIFEST_NAME} == set(manifest)
    verify_files(folder, manifest)


def test_save_may_be_followed_by_donation_at_once(tmp_path: Path) -> None:
    # Large enough to be still in the making when the buffers are given away and overwritten.
    state = new_state(1).replace(params={"w": jnp.arange(4_000_000, dtype=jnp.float32)})  # type: ignore[attr-defined]
    expected = np.asarray(state.params["w"]).copy()
    overwrite = jax.jit(lambda s: s.replace(params={"w": s.params["w"] * 0 - 1}), donate_argnums=0)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state, data_iterator=None, run_config=RUN_CONFIG)
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
    assert float(state.params["w"][0]) == -1
    np.testing.assert_array_equal(load_params(tmp_path).params["w"], expected)


def test_host_arrays_may_be_overwritten_after_save(tmp_path: Path) -> None:
    counts = np.arange(1_000_000)
    state = new_state(1).replace(opt_state={"counts": counts})  # type: ignore[attr-defined]
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state, data_iterator=None, run_config=RUN_CONFIG)
        counts[:] = -1
        wanted = abstract().replace(  # type: ignore[attr-defined]
            opt_state={"counts": jax.ShapeDtypeStruct(counts.shape, counts.dtype)}
        )
        with jax.enable_x64(True):
            restored = checkpointer.restore(wanted, data_iterator=None)
    assert restored is not None
    np.testing.assert_array_equal(restored.state.opt_state["counts"], np.arange(1_000_000))


@pytest.mark.parametrize("devices", [1, 8])
def test_restored_buffers_are_donated_in_place(tmp_path: Path, devices: int) -> None:
    """Otherwise a run that fits runs out of memory after its first resume."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    params = {
        str(size): jnp.arange(size, dtype=jnp.float32) for size in (8, 24, 104, 1000, 8008, 80_000)
    }
    state = new_state(1).replace(params=params)  # type: ignore[attr-defined]
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
        state,
    )
    wanted = wanted.replace(
        params=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec("data"))
            ),
            params,
        )
    )
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state, data_iterator=None, run_config=RUN_CONFIG)
        restored = checkpointer.restore(wanted, data_iterator=None)
    assert restored is not None

    def addresses(tree: Any) -> list[int]:
        return [
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
        ]

    before = addresses(restored.state.params)
    add_one = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    after = add_one(restored.state.params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored.state.params))
    assert addresses(after) == before
    assert_same(after, jax.tree.map(lambda leaf: leaf + 1, params))


def test_restores_into_other_shardings(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, PartitionSpec(("data", "tensor")))
    split = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=spread
            if leaf.ndim and leaf.shape[0] % 8 == 0
            else split
            if leaf.ndim > 1 and leaf.shape[1] % 2 == 0
            else NamedSharding(mesh, PartitionSpec()),
        ),
        abstract(),
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        restored = checkpointer.restore(wanted, data_iterator=None)
        assert restored is not None
        assert_same(restored.state, new_state(3))
        assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == shardings
        # And from eight devices back to one.
        checkpointer.save(4, restored.state, data_iterator=None, run_config=RUN_CONFIG)
        back = checkpointer.restore(abstract(), data_iterator=None)
    assert back is not None
    assert back.step == 4
    assert_same(back.state, new_state(3))
    assert back.state.params["params"]["embed"]["embedding"].devices() == {jax.devices()[0]}


def test_partitioning_boxes_neither_change_the_checkpoint_nor_get_lost(tmp_path: Path) -> None:
    state = boxed(new_state(2))
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(2, state, data_iterator=None, run_config=RUN_CONFIG)
        with_boxes = checkpointer.restore(boxed(abstract()), data_iterator=None)
        without = checkpointer.restore(abstract(), data_iterator=None)
    assert with_boxes is not None and without is not None
    assert_same(with_boxes.state, state)
    assert_same(without.state, new_state(2))
    assert_same(load_params(tmp_path).params, new_state(2).params)


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    values = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: float("nan"), 6: 4.0, 7: 5.0}
    config = CheckpointConfig(keep_last=2, keep_best=2)
    with Checkpointer(tmp_path, config) as checkpointer:
        for step, value in values.items():
            metrics = None if value is None else {METRIC: value}
            checkpointer.save(
                step, new_state(step), data_iterator=None, run_config=RUN_CONFIG, metrics=metrics
            )
    assert committed_steps(tmp_path) == [2, 3, 6, 7]
    assert names(tmp_path / "unfinished") == []
    assert load_params(tmp_path, best=True).step == 2


def test_best_may_be_the_highest(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="accuracy", best_mode="max")
    with Checkpointer(tmp_path, config) as checkpointer:
        for step, value in enumerate([0.1, 0.7, 0.3, 0.2], start=1):
            checkpointer.save(
                step,
                new_state(step),
                data_iterator=None,
                run_config=RUN_CONFIG,
                metrics={"accuracy": value},
            )
    assert committed_steps(tmp_path) == [2, 4]
    assert load_params(tmp_path, best=True).step == 2


def test_metrics_without_the_compared_one_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(
            1, new_state(1), data_iterator=None, run_config=RUN_CONFIG, metrics={"loss": 1.0}
        )
    assert f"no metric '{METRIC}' to be compared by, only loss" in caplog.text


@pytest.mark.parametrize("step", [5, 4, -1])
def test_saving_an_existing_or_older_step_is_refused(tmp_path: Path, step: int) -> None:
    save_steps(tmp_path, 5)
    with (
        Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
        pytest.raises(
            CheckpointError, match=f"step {step} cannot be saved .* next step is 6 or later"
        ),
    ):
        checkpointer.save(step, new_state(step), data_iterator=None, run_config=RUN_CONFIG)
    assert committed_steps(tmp_path) == [5]


def test_step_in_flight_is_not_saved_twice(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(5, new_state(5), data_iterator=None, run_config=RUN_CONFIG)
        with pytest.raises(CheckpointError, match="step 5 cannot be saved"):
            checkpointer.save(5, new_state(5), data_iterator=None, run_config=RUN_CONFIG)


def test_a_run_may_train_on_after_restoring(tmp_path: Path) -> None:
    iterator = new_iterator()
    with Checkpointer(tmp_path, CheckpointConfig(keep_last=2)) as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step, new_state(step), data_iterator=iterator, run_config=RUN_CONFIG)
            restored = checkpointer.restore(abstract(), data_iterator=iterator)
            assert restored is not None
            assert restored.step == step
    assert committed_steps(tmp_path) == [2, 3]


def test_should_save() -> None:
    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer.config = CheckpointConfig(every_steps=10)
    assert [step for step in range(31) if checkpointer.should_save(step)] == [10, 20, 30]


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("every_steps", 0, "at least 1"),
        ("keep_last", 0, "at least 1"),
        ("keep_best", -1, "at least 0"),
        ("best_mode", "lowest", "'min' or 'max'"),
    ],
)
def test_invalid_configuration_is_refused(field: str, value: Any, valid: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*{valid}.* found {value!r}"):
        CheckpointConfig(**{field: value})


def test_run_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
        pytest.raises(ValueError, match=r"run_config must hold JSON values only.*Float32DType"),
    ):
        checkpointer.save(
            1, new_state(1), data_iterator=None, run_config={"dtype": jnp.dtype("float32")}
        )


def test_state_without_params_is_refused(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
        pytest.raises(TypeError, match="with a field 'params', found dict"),
    ):
        checkpointer.save(1, {"w": jnp.ones(3)}, data_iterator=None, run_config=RUN_CONFIG)


def test_leaf_that_is_no_array_is_refused_by_path(tmp_path: Path) -> None:
    state = new_state(1).replace(opt_state={"name": "adam"})  # type: ignore[attr-defined]
    with (
        Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
        pytest.raises(TypeError, match=r"leaf opt_state/name .* must be an array, found str"),
    ):
        checkpointer.save(1, state, data_iterator=None, run_config=RUN_CONFIG)


def test_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("x")
    with pytest.raises(CheckpointError, match=r"the checkpoint folder .*file cannot be used"):
        Checkpointer(place, CheckpointConfig())


def test_missing_data_position_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, new_state(1), data_iterator=None, run_config=RUN_CONFIG)
        with pytest.raises(CheckpointMismatchError, match=r"process_0-of-1\.json, found none"):
            checkpointer.restore(abstract(), data_iterator=new_iterator())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"depth": 3},
            r"params/params/layers/kernel: found float32\[2,8,3\], expected float32\[3,8,3\]",
        ),
        ({"width": 16}, r"embedding: found float32\[16,8\], expected float32\[16,16\]"),
        ({"dtype": jnp.bfloat16}, r"embedding: found float32\[16,8\], expected bfloat16\[16,8\]"),
    ],
)
def test_another_model_is_refused_by_path(
    tmp_path: Path, wanted: dict[str, Any], message: str
) -> None:
    save_steps(tmp_path, 1)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        with pytest.raises(CheckpointMismatchError, match=message):
            checkpointer.restore(abstract(**wanted), data_iterator=None)
        assert checkpointer.latest_step() == 1


def test_missing_and_additional_arrays_are_refused_by_path(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    wanted = abstract()
    del wanted.params["params"]["embed"]
    wanted.params["params"]["head"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    with (
        Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
        pytest.raises(CheckpointMismatchError) as caught,
    ):
        checkpointer.restore(wanted, data_iterator=None)
    message = str(caught.value)
    assert "2 of its arrays differ" in message
    assert "params/params/embed/embedding: found float32[16,8], expected nothing" in message
    assert "params/params/head: found nothing, expected float32[4]" in message


def test_mismatch_does_not_fall_back_to_an_older_step_that_fits(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(
            2, new_state(2, width=16), data_iterator=None, run_config=RUN_CONFIG, wait=True
        )
        with pytest.raises(CheckpointMismatchError, match="step_00000002 was saved by another"):
            checkpointer.restore(abstract(), data_iterator=None)
    assert committed_steps(tmp_path) == [1, 2]


def test_long_lists_of_differences_are_cut(tmp_path: Path) -> None:
    many = {f"w{index}": jnp.ones(2) for index in range(40)}
    state = new_state(1).replace(params=many)  # type: ignore[attr-defined]
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state, data_iterator=None, run_config=RUN_CONFIG)
        with pytest.raises(CheckpointMismatchError, match=r"43 of its arrays .*; and 31 more$"):
            checkpointer.restore(abstract(), data_iterator=None)


def test_params_load_alone(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    latest = load_params(tmp_path)
    params, run_config, step = latest
    assert step == 2
    assert run_config == RUN_CONFIG
    assert_same(params, new_state(2).params)
    earlier = load_params(str(tmp_path), step=1)
    assert earlier.step == 1
    assert_same(earlier.params, new_state(1).params)


def test_params_load_into_shardings(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    last = SingleDeviceSharding(jax.devices()[-1])
    params = load_params(tmp_path, sharding=last).params
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {last}
    shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), params)
    shardings["params"]["layers"]["bias"] = last
    found = load_params(tmp_path, sharding=shardings).params
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == shardings
    assert_same(found, new_state(1).params)


def test_loading_params_changes_nothing_and_needs_no_optimizer_files(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for path in (step_folder(tmp_path, 1) / "state").rglob("*"):
        if path.is_file():
            path.unlink()
    before = sorted(tmp_path.rglob("*"))
    assert_same(load_params(tmp_path).params, new_state(1).params)
    assert sorted(tmp_path.rglob("*")) == before


def test_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is no checkpoint folder: it is no folder"):
        load_params(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"it holds no step, such as step_00000010$"):
        load_params(tmp_path)
    save_steps(tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match=r"holds no step, .*; .*checkpoints looks like one$"):
        load_params(tmp_path)


def test_unknown_step_or_best_is_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match="has no step 9, it has 1, 2"):
        load_params(tmp_path, step=9)
    with pytest.raises(CheckpointError, match=f"has the metric '{METRIC}', so none is the best"):
        load_params(tmp_path, best=True)
    with pytest.raises(ValueError, match="step and best exclude each other"):
        load_params(tmp_path, step=1, best=True)


def test_metadata_is_readable_without_this_library(tmp_path: Path) -> None:
    save_steps(tmp_path, 12)
    content = json.loads((step_folder(tmp_path, 12) / "metadata" / "metadata").read_text())
    assert content["format_version"] == 1
    assert content["step"] == 12
    assert content["tree"]["params/params/layers/bias"] == {"shape": [2, 5], "dtype": "bfloat16"}


def test_state_may_be_a_named_tuple_or_dataclass(tmp_path: Path) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Plain:
        params: Any
        count: Any

    state = Plain({"w": jnp.ones(3)}, jnp.int32(4))
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state, data_iterator=None, run_config={})
        restored = checkpointer.restore(jax.eval_shape(lambda: state), data_iterator=None)
    assert restored is not None
    assert_same(restored.state, state)
