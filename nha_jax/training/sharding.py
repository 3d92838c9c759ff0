"""One mesh for data and model parallelism, and the only place where logical axes meet mesh axes.

Modules name the axes of their parameters and activations ("embed", "heads", "batch", ...). This
file says which mesh axis each of those names is split over; nothing else in the library mentions
mesh axes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nha_jax.configuration import ConfigurationError
from nha_jax.models.config import NHAConfig

MESH_AXES = ("data", "fsdp", "context", "tensor")
# Rows of a batch are split over both: an fsdp group is a data group that also splits the
# parameters.
BATCH_AXES = ("data", "fsdp")

LogicalRules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one of them may be -1 and takes the devices that the others leave.

    Attributes:
        data: groups of devices that hold the same parameters and different rows of the batch.
        fsdp: devices over which rows and also the `width` axis of every parameter are split.
        context: devices over which the tokens of each sequence are split.
        tensor: devices over which heads, the feed-forward's hidden width and the vocabulary are
            split.
    """

    data: int = -1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in MESH_AXES:
            size = getattr(self, name)
            if size != -1 and size < 1:
                raise ValueError(f"{name} must be 1 or more, or -1 for the rest, found {size}.")
        if sum(getattr(self, name) == -1 for name in MESH_AXES) > 1:
            raise ValueError("at most one of data, fsdp, context and tensor may be -1.")


def mesh_sizes(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """Returns the sizes of the axes data, fsdp, context and tensor for a number of devices.

    Raises:
        ConfigurationError: if the sizes do not multiply to the number of devices.
    """
    sizes = [getattr(config, name) for name in MESH_AXES]
    named = math.prod(size for size in sizes if size != -1)
    wanted = " x ".join(f"{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True))
    if -1 in sizes:
        if num_devices % named:
            raise ConfigurationError(
                f"config.mesh is {wanted}, but the {num_devices} devices found cannot be divided "
                f"by {named}."
            )
        sizes[sizes.index(-1)] = num_devices // named
    elif named != num_devices:
        raise ConfigurationError(
            f"config.mesh is {wanted}, which needs {named} devices, but {num_devices} were found; "
            "use -1 for one axis to take the rest."
        )
    return tuple(sizes)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh with the axes of `MESH_AXES` over the given devices, or over all of them.

    Raises:
        ConfigurationError: if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices))
    # Explicit axes, the default, do not work with Linen's scan over layers with partitioned
    # parameters.
    return jax.make_mesh(
        sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), devices=devices
    )


def check_divisible(
    mesh: Mesh, model: NHAConfig, batch_size: int, microbatches: int, sequence_length: int
) -> None:
    """Checks that what is split can be split evenly.

    Args:
        mesh: the mesh.
        model: the model, whose heads and widths are split over tensor and fsdp.
        batch_size: sequences in an optimizer step, over all devices.
        microbatches: parts into which the batch is divided for gradient accumulation.
        sequence_length: tokens in a row.

    Raises:
        ConfigurationError: naming the first size that its mesh axes do not divide.
    """
    if batch_size % microbatches:
        raise ConfigurationError(
            f"config.data.batch_size is {batch_size}, which config.train.microbatches "
            f"({microbatches}) does not divide."
        )
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    demands = (
        ("tensor", mesh.shape["tensor"], "model.num_kv_heads", model.num_kv_heads),
        ("tensor", mesh.shape["tensor"], "model.feed_forward_width", model.feed_forward_width),
        ("fsdp", mesh.shape["fsdp"], "model.width", model.width),
        ("context", mesh.shape["context"], "data.sequence_length", sequence_length),
        ("data * fsdp", rows, "data.batch_size / train.microbatches", batch_size // microbatches),
    )
    for axes, size, name, value in demands:
        if value % size:
            raise ConfigurationError(
                f"config.{name} is {value}, which the mesh's {axes} ({size}) does not divide."
            )


def logical_axis_rules(mesh: Mesh, model: NHAConfig) -> LogicalRules:
    """Returns which mesh axis each logical axis is split over; axes not listed are not split.

    In one array a mesh axis is used once, by the first rule that applies: activations
    ("batch", "length", "embed") use fsdp for the batch, parameters ("embed", "mlp") for the width.
    """
    # 259 tokens of the bytes tokenizer over 2 devices: such a vocabulary is not split.
    vocabulary = "tensor" if model.vocab_size % mesh.shape["tensor"] == 0 else None
    return (
        ("batch", BATCH_AXES),
        ("vocab", vocabulary),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("embed", "fsdp"),
        ("layers", None),
        ("length", "context"),
        ("head_dim", None),
        ("slots", None),
    )


def state_shardings(mesh: Mesh, rules: LogicalRules, boxed: Any) -> Any:
    """Returns the sharding of every leaf of a tree whose leaves carry logical axis names.

    Args:
        mesh: the mesh.
        rules: as from `logical_axis_rules`.
        boxed: shapes with Linen's partitioning boxes, as from `jax.eval_shape` of `init`; leaves
            without a box are kept whole on every device.

    Returns:
        A tree of `NamedSharding` with the structure of `boxed` without its boxes.
    """
    specs = nn.get_partition_spec(boxed)
    return nn.logical_to_mesh_sharding(specs, mesh, rules)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch array [B, T]: rows over data and fsdp, T over context."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context"))


def process_rows(mesh: Mesh, num_rows: int) -> tuple[int, int]:
    """Returns which part of every batch this process reads: its number, and how many parts.

    Processes whose devices hold the same rows, because the mesh splits tokens or parameters over
    them, read the same part.

    Args:
        mesh: the mesh.
        num_rows: rows of a batch, over all devices.

    Raises:
        ConfigurationError: if the mesh gives processes parts that overlap.
    """
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    parts: dict[int, set[int]] = {}
    shards: Any = sharding.devices_indices_map((num_rows,))
    for device, (rows,) in shards.items():
        parts.setdefault(device.process_index, set()).update(range(num_rows)[rows])
    distinct = sorted({tuple(sorted(rows)) for rows in parts.values()})
    if sum(map(len, distinct)) != num_rows or len({len(rows) for rows in distinct}) != 1:
        raise ConfigurationError(
            "config.mesh gives the processes overlapping rows of a batch: let fsdp, context and "
            "tensor together be a divisor or a multiple of the devices of one process."
        )
    return distinct.index(tuple(sorted(parts[jax.process_index()]))), len(distinct)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def put_batch(batch: dict[str, Any], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Makes global arrays of this process's rows of a batch, each row whole."""
    shards = sharding.mesh.shape["data"] * sharding.mesh.shape["fsdp"]
    own: Any = sharding.addressable_devices_indices_map((shards, 1 << 30))
    held = {rows.start or 0 for rows, *_ in own.values()}
    arrays = {}
    for name, rows in batch.items():
        shape = (rows.shape[0] * shards // len(held), *rows.shape[1:])
        arrays[name] = jax.make_array_from_process_local_data(sharding, rows, shape)
    return arrays
