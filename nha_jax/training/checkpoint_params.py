"""Reading the parameters of a checkpoint without its optimizer state, to evaluate or generate."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from nha_jax.training import checkpoint_format as layout
from nha_jax.training.checkpoint_format import CheckpointError
from nha_jax.training.checkpoint_tree import with_sharding
from nha_jax.training.integrity import DamagedError, verify_files

logger = logging.getLogger(__name__)


class LoadedParams(NamedTuple):
    """Parameters without optimizer state: nested dicts of arrays, as the model names them."""

    params: dict[str, Any]
    run_config: dict[str, Any]
    step: int


def load_params(
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    best: bool = False,
    sharding: Any = None,
) -> LoadedParams:
    """Reads the parameters of a checkpoint, without optimizer state, and changes nothing.

    What is read is verified. Without `step` and `best` the latest sound step is taken, with a
    warning where a later one is damaged.

    Args:
        directory: the checkpoint folder of a run.
        step: the step to read.
        best: read the best step by the metric that the run was configured with.
        sharding: a `jax.sharding.Sharding` for every parameter, or a pytree of them; None is the
            default device.

    Returns:
        `(params, run_config, step)`.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, or holds no run config.
        CheckpointVersionError: its format version is unknown.
    """
    directory = Path(directory).absolute()
    wanted = _steps_to_read(directory, step, best)
    reasons = []
    for candidate in wanted:
        folder = directory / layout.step_name(candidate)
        try:
            metadata, manifest = layout.read_metadata(folder, candidate)
            needed = {name: manifest[name] for name in manifest if name.startswith("params/")}
            verify_files(folder, needed)
        except DamagedError as error:
            logger.warning("%s is damaged, incomplete or no checkpoint: %s", folder, error)
            reasons.append(f"{folder.name}: {error}")
            continue
        params = _read(folder / "params", sharding)
        return LoadedParams(params, metadata.run_config, candidate)
    raise CheckpointError(f"no wanted step in {directory} is sound ({'; '.join(reasons)})")


def _read(folder: Path, sharding: Any) -> dict[str, Any]:
    """Reads a tree of arrays as nested dicts, in the shapes and dtypes it was saved in."""
    handler = ocp.StandardCheckpointHandler()
    try:
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), handler.metadata(folder).tree
        )
        if sharding is None or isinstance(sharding, jax.sharding.Sharding):
            abstract = jax.tree.map(lambda leaf: with_sharding(leaf, sharding), abstract)
        else:
            abstract = jax.tree.map(with_sharding, abstract, sharding)
        return handler.restore(folder, args=ocp.args.StandardRestore(abstract))
    finally:
        handler.close()


def _steps_to_read(directory: Path, step: int | None, best: bool) -> list[int]:
    """The steps that `load_params` may take, the first one first."""
    if step is not None and best:
        raise ValueError(f"step and best exclude each other, found step={step} and best=True.")
    steps = list(layout.step_folders(directory))
    if not steps:
        nested = [path.parent for path in directory.glob(f"*/{layout.STEP_PREFIX}_*")]
        hint = f"; {nested[0]} looks like one" if nested else ""
        what = "holds no step" if directory.is_dir() else "is no folder"
        raise CheckpointError(
            f"{directory} is no checkpoint folder: it {what}, such as {layout.step_name(10)}{hint}"
        )
    if step is not None:
        if step not in steps:
            raise CheckpointError(
                f"{directory} has no step {step}, it has {', '.join(map(str, steps))}"
            )
        return [step]
    if not best:
        return steps[::-1]
    described = layout.sound_metadata(directory, steps)
    if not described:
        raise CheckpointError(f"no step in {directory} is sound, so none is the best")
    newest = described[max(described)]
    ranked = layout.best_steps(
        {number: metadata.metrics for number, metadata in described.items()},
        newest.best_metric,
        newest.best_mode,
    )
    if not ranked:
        raise CheckpointError(
            f"no step in {directory} has the metric {newest.best_metric!r}, so none is the best"
        )
    return ranked[:1]
