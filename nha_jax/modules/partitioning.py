"""Logical names of axes: parameters carry them, and the operator is split by them."""

from typing import Any

import flax.linen as nn
import jax
from flax.typing import Dtype, Initializer
from jax.sharding import PartitionSpec

from nha_jax.ops.sharded import OperatorAxes


def partitioned_parameter(
    module: nn.Module,
    name: str,
    init: Initializer,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    dtype: Dtype,
) -> jax.Array:
    """Declares a parameter of `module` with one logical name an axis.

    The names ("vocab", "embed", "heads", "kv_heads", "head_dim", "slots", "mlp"; "layers" is added
    where layers are stacked) become mesh axes by whatever `nn.logical_axis_rules` say.
    """
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)
    return value


def operator_axes(batch: int, length: int, num_kv_heads: int) -> OperatorAxes | None:
    """Returns how the operator's arrays are split by the mesh and the logical axis rules in force.

    Args:
        batch: rows B.
        length: tokens T.
        num_kv_heads: key/value heads K.

    Returns:
        The axes; None where there is one device, no mesh is set (`jax.set_mesh`), or the sizes
        cannot be split evenly: then each device computes what the compiler gives it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    spec: Any = nn.logical_to_mesh_axes(("batch", "length", "kv_heads"))
    if spec is None:
        return None
    rows, tokens, heads = (_names(axis) for axis in PartitionSpec(*spec, *[None] * 3)[:3])
    if not (rows or tokens or heads) or len(tokens) > 1:
        return None
    axes = OperatorAxes(mesh, rows, tokens[0] if tokens else None, heads)
    return axes if axes.divides(batch, length, num_kv_heads) else None


def _names(axis: Any) -> tuple[str, ...]:
    """Mesh axes of one array axis: None, a name or several."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)
