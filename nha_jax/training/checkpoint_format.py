"""What a checkpoint folder looks like: names, metadata and errors.

    DIRECTORY/
      step_00000010/          one committed step, moved here whole as the last act of a save
        params/               Orbax: the parameters alone, so that evaluation reads nothing else
        state/                Orbax: the rest of the train state (optimizer moments, counters)
        data/                 Grain: the position of the data iterator, one file a process
        metadata/metadata     JSON: format version, step, run config, metrics, shapes and dtypes
        MANIFEST.json         size and SHA-256 of every file above
      unfinished/             the save in flight, and what a killed run left; emptied at the start
      corrupt/                damaged or stray steps that a restore set aside

A step is committed if and only if it stands in DIRECTORY with a manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nha_jax.training.integrity import MANIFEST_NAME, DamagedError, read_manifest, verify_files

FORMAT_VERSION = 1
UNFINISHED_FOLDER = "unfinished"
CORRUPT_FOLDER = "corrupt"
STEP_PREFIX = "step"
STEP_DIGITS = 8
METADATA_FILE = "metadata/metadata"

_STEP_NAME = re.compile(rf"{STEP_PREFIX}_(\d{{{STEP_DIGITS},}})")


class CheckpointError(Exception):
    """A checkpoint could not be written, found or read."""


class CheckpointMismatchError(CheckpointError):
    """A sound checkpoint of another model or optimizer: paths, shapes or dtypes differ."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint whose format version this library does not know."""


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """What a step says of itself.

    Attributes:
        step: the optimizer step at which it was saved.
        run_config: the configuration of the run, as JSON gives it back.
        metrics: metric name -> value at that step; empty where none was measured.
        best_metric: the metric that the run compares its steps by.
        best_mode: "min" or "max", which of its values is best.
        tree: path of every leaf of the train state -> {"shape": [...], "dtype": "..."}.
    """

    step: int
    run_config: dict[str, Any]
    metrics: dict[str, float]
    best_metric: str
    best_mode: str
    tree: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the metadata file, whose first field is the format version."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}


def step_name(step: int) -> str:
    """The folder name of a step: "step_00000010"."""
    return f"{STEP_PREFIX}_{step:0{STEP_DIGITS}d}"


def step_folders(directory: Path) -> dict[int, Path]:
    """Every folder in `directory` that is named like a step, committed or not, in rising order."""
    found = {}
    if directory.is_dir():
        for path in directory.iterdir():
            match = _STEP_NAME.fullmatch(path.name)
            if match and path.is_dir() and path.name == step_name(int(match[1])):
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def committed_steps(directory: Path) -> list[int]:
    """The steps in `directory` that were saved to their end, in rising order."""
    folders = step_folders(directory)
    return [step for step, path in folders.items() if (path / MANIFEST_NAME).is_file()]


def read_metadata(folder: Path, step: int) -> tuple[StepMetadata, dict[str, dict[str, Any]]]:
    """Reads and verifies what a step says of itself; its arrays are not looked at.

    Args:
        folder: the step's folder.
        step: the step that its name promises.

    Returns:
        The metadata, and the manifest to verify the rest with.

    Raises:
        CheckpointVersionError: the step was written in another format version.
        DamagedError: there is no manifest, or the metadata is not what was written.
    """
    try:
        content = json.loads((folder / METADATA_FILE).read_bytes())
        version = content["format_version"]
    except FileNotFoundError:
        raise DamagedError(f"{METADATA_FILE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{METADATA_FILE} is unreadable ({error!r})") from error
    if version != FORMAT_VERSION:
        _check_not_damaged(folder)
        raise CheckpointVersionError(
            f"{folder} has checkpoint format version {version!r}, "
            f"but this library reads version {FORMAT_VERSION}"
        )
    manifest = read_manifest(folder)
    if METADATA_FILE not in manifest:
        raise DamagedError(f"{MANIFEST_NAME} does not list {METADATA_FILE}")
    verify_files(folder, {METADATA_FILE: manifest[METADATA_FILE]})
    if content.get("run_config") is None:
        raise CheckpointError(
            f"{folder} holds no run config, so the model it belongs to is unknown: "
            f"{METADATA_FILE} must have the field 'run_config'"
        )
    try:
        fields = {field.name: content[field.name] for field in dataclasses.fields(StepMetadata)}
    except KeyError as error:
        raise DamagedError(f"{METADATA_FILE} lacks the field {error}") from error
    metadata = StepMetadata(**fields)
    if metadata.step != step:
        raise DamagedError(f"it holds step {metadata.step}, not the step of its name")
    return metadata, manifest


def _check_not_damaged(folder: Path) -> None:
    """Tells a flipped byte in the version's place from another version.

    Another version may keep its checksums in another way. Only checksums that are kept in this
    version's way and do not match say that the step is damaged; else it is refused and stays.

    Raises:
        DamagedError: the metadata is not what was written.
    """
    try:
        entry = read_manifest(folder)[METADATA_FILE]
    except (DamagedError, KeyError):
        return
    verify_files(folder, {METADATA_FILE: entry})


def sound_metadata(directory: Path, steps: Iterable[int]) -> dict[int, StepMetadata]:
    """The metadata of those of `steps` where it is sound and of this version."""
    found = {}
    for step in steps:
        with contextlib.suppress(DamagedError, CheckpointError):
            found[step], _ = read_metadata(directory / step_name(step), step)
    return found


def best_steps(metrics: Mapping[int, Mapping[str, float]], name: str, mode: str) -> list[int]:
    """Steps that have the metric `name` as a number, the best first; of equals the later first.

    Args:
        metrics: step -> its metrics.
        name: the metric to compare.
        mode: "min" or "max", which of its values is best.
    """
    sign = 1.0 if mode == "min" else -1.0
    values = {step: sign * found[name] for step, found in metrics.items() if name in found}
    comparable = [step for step, value in values.items() if not math.isnan(value)]
    return sorted(comparable, key=lambda step: (values[step], -step))
