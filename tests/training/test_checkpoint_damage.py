"""Steps that are damaged, incomplete or stray: recognised, set aside, and the previous one used."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nha_jax.training import checkpoint_format
from nha_jax.training.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    CheckpointVersionError,
    load_params,
)
from nha_jax.training.checkpoint_folder import CheckpointFolder
from nha_jax.training.checkpoint_format import METADATA_FILE, committed_steps
from nha_jax.training.checkpoint_tree import describe_tree
from nha_jax.training.integrity import MANIFEST_NAME, write_manifest
from tests.training.checkpoint_states import (
    RUN_CONFIG,
    abstract,
    assert_same,
    names,
    new_iterator,
    new_state,
    save_steps,
    step_folder,
)


def array_file(folder: Path, item: str = "state") -> Path:
    """The file that holds the numbers of an item."""
    files = [path for path in (folder / item).rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip_byte(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def truncate(folder: Path) -> None:
    path = array_file(folder)
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def take_another_steps_place(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(step_folder(folder.parent, 1), folder)


def edit_manifest(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_text())
    del content["files"][array_file(folder).relative_to(folder).as_posix()]
    path.write_text(json.dumps(content))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated array file": (truncate, r"state/.* has \d+ bytes where \d+ were written"),
    "removed array file": (lambda folder: array_file(folder).unlink(), r"state/.* is missing"),
    "flipped byte of the state": (
        lambda folder: flip_byte(array_file(folder), 20),
        r"state/.* has the SHA-256 \w+\.\.\. where \w+\.\.\. was written",
    ),
    "flipped byte of the parameters": (
        lambda folder: flip_byte(array_file(folder, "params")),
        r"params/.* has the SHA-256",
    ),
    "flipped byte of the data position": (
        lambda folder: flip_byte(folder / "data" / "process_0-of-1.json"),
        r"data/process_0-of-1\.json has the SHA-256",
    ),
    "truncated metadata": (
        lambda folder: (folder / METADATA_FILE).write_text('{"format_version": 1, "st'),
        r"metadata/metadata is unreadable",
    ),
    "metadata of other content": (
        lambda folder: (folder / METADATA_FILE).write_text('{"format_version": 1, "step": 2}'),
        r"metadata/metadata has 32 bytes",
    ),
    "removed metadata": (
        lambda folder: (folder / METADATA_FILE).unlink(),
        "metadata/metadata is missing",
    ),
    "removed manifest": (
        lambda folder: (folder / MANIFEST_NAME).unlink(),
        r"MANIFEST\.json is missing",
    ),
    "truncated manifest": (
        lambda folder: (folder / MANIFEST_NAME).write_text("{"),
        r"MANIFEST\.json is unreadable",
    ),
    "edited manifest": (edit_manifest, r"MANIFEST\.json does not match its own checksum"),
    "empty stray folder": (empty, "metadata/metadata is missing"),
    "copy of another step": (take_another_steps_place, "holds step 1, not the step of its name"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_step_is_set_aside_and_the_previous_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save_steps(tmp_path, 1, 2)
    inflict, message = DAMAGES[damage]
    inflict(step_folder(tmp_path, 2))
    iterator = new_iterator()
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        restored = checkpointer.restore(abstract(), data_iterator=iterator)
        assert restored is not None
        assert restored.step == 1
        assert_same(restored.state, new_state(1))
        assert checkpointer.latest_step() == 1
        assert names(tmp_path / "corrupt") == ["step_00000002"]
        assert re.search(rf"WARNING .*step_00000002 was set aside as .*: .*{message}", caplog.text)
        # The step can be saved anew, and damaged anew.
        checkpointer.save(2, new_state(2), data_iterator=iterator, run_config=RUN_CONFIG, wait=True)
        inflict(step_folder(tmp_path, 2))
        assert checkpointer.restore(abstract(), data_iterator=iterator) is not None
    assert names(tmp_path / "corrupt") == ["step_00000002", "step_00000002-2"]


def test_flipped_byte_in_any_file_is_recognised(tmp_path: Path) -> None:
    """Orbax accepts a flipped byte, and hands out the wrong numbers."""
    save_steps(tmp_path / "run", 1, 2)
    expected = describe_tree(abstract())
    folder = step_folder(tmp_path / "run", 2)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    for number, name in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", copy)
        content = (folder / name).read_bytes()
        flip_byte(step_folder(copy, 2) / name, len(content) // 2)
        checkpoints = CheckpointFolder(copy, CheckpointConfig())
        assert checkpoints.latest_sound_step(expected) == 1, name
        assert names(copy / "corrupt") == ["step_00000002"]


def test_several_bad_steps_are_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    truncate(step_folder(tmp_path, 2))
    flip_byte(array_file(step_folder(tmp_path, 3)))
    (tmp_path / "step_00000099").mkdir()
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        # Neither a stray folder nor one without a manifest is ever the latest step.
        assert checkpointer.latest_step() == 3
        restored = checkpointer.restore(abstract(), data_iterator=None)
    assert restored is not None
    assert restored.step == 1
    assert names(tmp_path / "corrupt") == ["step_00000002", "step_00000003", "step_00000099"]
    assert committed_steps(tmp_path) == [1]


def test_no_sound_step_is_an_error_at_every_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    truncate(step_folder(tmp_path, 1))
    (step_folder(tmp_path, 2) / MANIFEST_NAME).unlink()
    for _ in range(2):
        with (
            Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
            pytest.raises(
                CheckpointError,
                match=r"no step in .* is sound \(step_00000002: MANIFEST.*; step_00000001: "
                r"state/.* restore the folder from a copy, or remove it to start from zero",
            ),
        ):
            checkpointer.restore(abstract(), data_iterator=None)
    with pytest.raises(CheckpointError, match=r"no wanted step in .* is sound"):
        load_params(tmp_path, step=2)


def test_stray_folder_gives_way_to_a_new_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "note.txt").write_text("x")
    save_steps(tmp_path, 1)
    assert committed_steps(tmp_path) == [1]
    assert (tmp_path / "corrupt" / "step_00000001" / "note.txt").exists()
    assert "step_00000001 was set aside" in caplog.text
    assert_same(load_params(tmp_path).params, new_state(1).params)


def test_other_names_are_no_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for name in ("2", "step_2", "step_000000003", "step_abc", "step_00000004.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000005").write_text("a file")
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        restored = checkpointer.restore(abstract(), data_iterator=None)
    assert restored is not None
    assert restored.step == 1
    assert not (tmp_path / "corrupt").exists()


def test_leftovers_of_a_killed_run_are_removed_at_the_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "unfinished" / "step_00000002")
    Checkpointer(tmp_path, CheckpointConfig()).close()
    assert names(tmp_path / "unfinished") == []
    assert committed_steps(tmp_path) == [1]


def test_unknown_format_version_is_refused_by_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    path = step_folder(tmp_path, 2) / METADATA_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 7}))
    write_manifest(step_folder(tmp_path, 2))
    message = "step_00000002 has checkpoint format version 7, but this library reads version 1"
    with (
        Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
        pytest.raises(CheckpointVersionError, match=message),
    ):
        checkpointer.restore(abstract(), data_iterator=None)
    with pytest.raises(CheckpointVersionError, match=message):
        load_params(tmp_path)
    # It is another library's, not damaged: it stays.
    assert committed_steps(tmp_path) == [1, 2]


def test_a_flipped_version_is_damage_and_no_other_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)
    path = step_folder(tmp_path, 2) / METADATA_FILE
    text = path.read_text()
    flipped = text.replace('"format_version": 1', '"format_version": 9')
    assert flipped != text
    path.write_text(flipped)
    assert load_params(tmp_path).step == 1
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        restored = checkpointer.restore(abstract(), data_iterator=None)
    assert restored is not None
    assert restored.step == 1
    assert "was set aside" in caplog.text


def test_checkpoint_of_a_later_version_is_refused_with_its_own_checksums_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_format, "FORMAT_VERSION", 2)
        save_steps(tmp_path, 1)
    with pytest.raises(CheckpointVersionError, match="format version 2"):
        load_params(tmp_path)


def test_checkpoint_without_config_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_json = checkpoint_format.StepMetadata.to_json

    def without_config(self: checkpoint_format.StepMetadata) -> dict[str, object]:
        content = to_json(self)
        del content["run_config"]
        return content

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_format.StepMetadata, "to_json", without_config)
        save_steps(tmp_path, 1)
    with pytest.raises(CheckpointError, match="step_00000001 holds no run config"):
        load_params(tmp_path)


def test_params_of_the_previous_step_are_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)
    flip_byte(array_file(step_folder(tmp_path, 2), "params"))
    loaded = load_params(tmp_path)
    assert loaded.step == 1
    assert_same(loaded.params, new_state(1).params)
    assert "step_00000002 is damaged" in caplog.text
    # Reading changes nothing, and a step asked for by name has no stand-in.
    assert committed_steps(tmp_path) == [1, 2]
    with pytest.raises(CheckpointError, match=r"no wanted step .*step_00000002: params/"):
        load_params(tmp_path, step=2)
