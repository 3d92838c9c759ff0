"""The operator on a mesh: rows and heads apart, and the sequence split over devices.

Rows and key/value heads are independent, so each device runs the operator on its own. Where the
sequence is split (context parallelism), a device continues what the devices to its left hold, and
"continue" is what an initial state means. So each device is given the state at its left edge:

- the window, the last W tokens before the edge, which the left neighbours send (a halo);
- the slots, from an associative scan over devices. A device maps the slots at its left edge to
  those at its right edge by S -> decay * S + written, and two such maps compose to one of the same
  kind, so the scan takes log2(devices) exchanges of the size of the slots;
- the number of tokens that its first segment has had, a few integers a row.

Full attention gathers keys and values instead. The result is that of one device, gradients too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from nha_jax.ops.api import native_hybrid_attention
from nha_jax.ops.inputs import product_precision
from nha_jax.ops.rotary import apply_rotary
from nha_jax.ops.segments import Counters, segment_layout
from nha_jax.ops.state import NHAState
from nha_jax.ops.window_attention import windowed_attention


@dataclasses.dataclass(frozen=True)
class OperatorAxes:
    """Which mesh axes the operator's array axes are split over.

    Attributes:
        mesh: the mesh.
        batch: mesh axes of the rows B.
        length: mesh axis of the tokens T, or None where each device has whole sequences.
        heads: mesh axes of the key/value heads K, and with them of the query heads N.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    length: str | None
    heads: tuple[str, ...]

    def size(self, axes: tuple[str, ...] | str | None) -> int:
        """Number of devices along mesh axes."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        size = 1
        for name in names:
            size *= self.mesh.shape[name]
        return size

    def divides(self, batch: int, length: int, num_kv_heads: int) -> bool:
        """Whether arrays of these sizes can be split evenly."""
        return (
            batch % self.size(self.batch) == 0
            and length % self.size(self.length) == 0
            and num_kv_heads % self.size(self.heads) == 0
        )


def sharded_native_hybrid_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    log_gate: Float[Array, "B T K M"],
    *,
    axes: OperatorAxes,
    window: int | None | Int[Array, ""],
    slot_query: Float[Array, "B T N H"] | None = None,
    slot_key: Float[Array, "B T K H"] | None = None,
    rotary: tuple[Array, Array] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    return_slot_share: bool = False,
    **options: Any,
) -> Any:
    """`native_hybrid_attention` of arrays that are split over the devices of a mesh.

    No activation is gathered but, where T is split, the keys and values of full attention, and all
    inputs of a traced window.

    Args:
        query: [B, T, N, H]; this and all other arrays are global, as in `native_hybrid_attention`.
        key: [B, T, K, H].
        value: [B, T, K, V].
        log_gate: [B, T, K, M].
        axes: how they are split; B, T and K must be divisible.
        window: static, None, or a traced scalar.
        slot_query: [B, T, N, H] or None.
        slot_key: [B, T, K, H] or None.
        rotary: (cos, sin) or None.
        segment_ids: [B, T] or None.
        return_slot_share: whether to return the softmax mass on the slots.
        **options: of `native_hybrid_attention`, without states.

    Returns:
        out [B, T, N, V], or (out, slot_share [B, T, N]).

    Raises:
        ValueError: as `native_hybrid_attention`, and for sizes that the mesh does not divide.
    """
    batch, length, _, _ = query.shape
    if not axes.divides(batch, length, key.shape[2]):
        raise ValueError(
            f"query has B={batch} and T={length} and key K={key.shape[2]}, but the mesh splits "
            f"them in {axes.size(axes.batch)}, {axes.size(axes.length)} and "
            f"{axes.size(axes.heads)} parts, which must divide them."
        )
    rows = PartitionSpec(axes.batch, axes.length)
    heads = PartitionSpec(axes.batch, axes.length, axes.heads)
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "log_gate": log_gate}
    specs: dict[str, Any] = dict.fromkeys(given, heads)
    for name, x in (("slot_query", slot_query), ("slot_key", slot_key)):
        if x is not None:
            given[name], specs[name] = x, heads
    if segment_ids is not None:
        given["segment_ids"], specs["segment_ids"] = segment_ids, rows
    if rotary is not None:
        tables = PartitionSpec(axes.length) if rotary[0].ndim == 2 else rows
        given["rotary"], specs["rotary"] = tuple(rotary), (tables, tables)
    is_traced = window is not None and not isinstance(window, int)
    if is_traced:
        given["window"], specs["window"] = window, PartitionSpec()

    run: Callable[..., Any] = native_hybrid_attention
    if axes.length is not None and axes.size(axes.length) > 1:
        run = _gathered if is_traced else _continued
        options["axis"] = axes.length
        options["parts"] = axes.size(axes.length)

    def local(arrays: dict[str, Any]) -> tuple[Array, Array]:
        static = {} if is_traced else {"window": window}
        return run(**arrays, **static, **options, return_slot_share=True)

    out, slot_share = jax.shard_map(
        local,
        mesh=axes.mesh,
        in_specs=(specs,),
        out_specs=(heads, heads),
        # Every mesh axis that matters splits every output; the operator's loops need not be told.
        check_vma=False,
    )(given)
    return (out, slot_share) if return_slot_share else out


def _gathered(*, axis: str, parts: int, **arrays: Any) -> tuple[Array, Array]:
    """A traced window: each device runs the whole sequence and keeps its part."""
    del parts
    length = arrays["query"].shape[1]
    for name in ("query", "key", "value", "log_gate", "slot_query", "slot_key", "segment_ids"):
        if name in arrays:
            arrays[name] = jax.lax.all_gather(arrays[name], axis, axis=1, tiled=True)
    if arrays.get("rotary") is not None:
        arrays["rotary"] = tuple(
            jax.lax.all_gather(table, axis, axis=table.ndim - 2, tiled=True)
            for table in arrays["rotary"]
        )
    out, slot_share = native_hybrid_attention(**arrays)
    first = jax.lax.axis_index(axis) * length
    own = [jax.lax.dynamic_slice_in_dim(x, first, length, axis=1) for x in (out, slot_share)]
    return own[0], own[1]


def _continued(
    query,
    key,
    value,
    log_gate,
    *,
    axis: str,
    parts: int,
    window: int | None,
    slot_query=None,
    slot_key=None,
    rotary=None,
    segment_ids=None,
    **options: Any,
) -> tuple[Array, Array]:
    """A static window: each device goes on from the state at its left edge."""
    batch, length = query.shape[:2]
    slot_query = query if slot_query is None else slot_query
    slot_key = key if slot_key is None else slot_key
    if rotary is not None:
        # Once, here: the neighbour's keys arrive rotated.
        query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)
    if segment_ids is None:
        segment_ids = jnp.ones((batch, length), jnp.int32)
    before = _counters_before(segment_ids, axis, parts)
    if window is None:
        return _full(query, key, value, segment_ids, before, axis, **options)
    is_token = (segment_ids > 0)[:, :, None, None]
    written = {"key": key, "slot_key": slot_key, "value": value, "log_gate": log_gate}
    halo = {
        name: _rows_before(jnp.where(is_token, x, 0), window, axis, parts)
        for name, x in written.items()
    }
    ring = {name: _as_ring(x, before.length) for name, x in halo.items()}
    wide = jnp.promote_types(query.dtype, jnp.float32)
    num_kv_heads, num_slots = log_gate.shape[2:]
    empty = jnp.zeros((batch, num_kv_heads, num_slots, 1), wide)
    state = NHAState(
        slot_key=jnp.broadcast_to(empty, (*empty.shape[:3], key.shape[-1])),
        slot_value=jnp.broadcast_to(empty, (*empty.shape[:3], value.shape[-1])),
        window_key=ring["key"],
        window_slot_key=ring["slot_key"],
        window_value=ring["value"],
        window_log_gate=ring["log_gate"].astype(wide),
        length=before.length,
        segment_id=before.segment_id,
        window=window,
    )

    def run(state, **more):
        return native_hybrid_attention(
            query,
            key,
            value,
            log_gate,
            window=window,
            slot_query=slot_query,
            slot_key=slot_key,
            segment_ids=segment_ids,
            initial_state=state,
            **(options | more),
        )

    if num_slots:
        # What this device writes to empty slots, and what is left of what was there before.
        _, end = run(state, return_slot_share=False, return_state=True)
        gates = jnp.concatenate([halo["log_gate"], jnp.where(is_token, log_gate, 0)], axis=1)
        decay = _decay(gates[:, :length].astype(wide), segment_ids, before, window)
        slots = _slots_before(decay, (end.slot_key, end.slot_value), axis, parts)
        state = dataclasses.replace(state, slot_key=slots[0], slot_value=slots[1])
    return run(state)


def _full(query, key, value, segment_ids, before: Counters, axis: str, **options: Any):
    """Causal attention to the keys of all devices; none to the right is within reach."""
    length = query.shape[1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    is_token = segment_ids > 0
    scale = options.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    precision = product_precision(query.dtype)

    def everything(x):
        x = jnp.where(is_token[:, :, None, None], x, 0)
        x = jax.lax.all_gather(x, axis, axis=1, tiled=True)
        # This device's own tokens last, as `windowed_attention` wants them. What comes to stand
        # first is to the right of them: the numbers of tokens in a segment never reach there.
        last = (jax.lax.axis_index(axis) + 1) * length
        return jnp.roll(x, -last, axis=1).astype(wide)

    layout = segment_layout(segment_ids, before)
    query = jnp.where(is_token[:, :, None, None], query, 0).astype(wide) * scale
    out, _ = windowed_attention(
        query,
        everything(key),
        everything(value),
        jnp.where(is_token, layout.number, -1),
        far=jnp.max(layout.number),
        precision=precision,
    )
    return out.astype(value.dtype), jnp.zeros(query.shape[:3], wide)


def _counters_before(segment_ids, axis: str, parts: int) -> Counters:
    """The tokens that the last segment before this device's edge has had, and its id."""
    layout = segment_layout(segment_ids, None)
    whole = (layout.start[:, -1] == 0) & (segment_ids[:, 0] > 0)  # its last run is its first
    summary = jnp.stack(
        [layout.final_length, layout.final_id, segment_ids[:, 0], whole.astype(jnp.int32)]
    )
    summaries = jax.lax.all_gather(summary, axis)  # [parts, 4, B]: a few integers a row
    length = jnp.zeros_like(summary[0])
    segment_id = jnp.zeros_like(length)
    lengths, ids = [length], [segment_id]
    for part in range(parts - 1):
        own_length, own_id, first_id, is_whole = summaries[part]
        goes_on = (is_whole > 0) & (first_id == segment_id)
        has_tokens = own_id > 0
        length = jnp.where(has_tokens, own_length + jnp.where(goes_on, length, 0), length)
        segment_id = jnp.where(has_tokens, own_id, segment_id)
        lengths.append(length)
        ids.append(segment_id)
    index = jax.lax.axis_index(axis)
    return Counters(jnp.stack(lengths)[index], jnp.stack(ids)[index])


def _rows_before(x: Array, count: int, axis: str, parts: int) -> Array:
    """The `count` rows along T to the left of this device's edge; zeros before the first token."""
    length = x.shape[1]
    blocks: list[Array] = []
    missing = count
    for distance in range(1, parts):
        if missing <= 0:
            break
        rows = min(missing, length)
        pairs = [(source, source + distance) for source in range(parts - distance)]
        blocks.insert(0, jax.lax.ppermute(x[:, length - rows :], axis, pairs))
        missing -= rows
    if missing > 0 or not blocks:
        blocks.insert(0, jnp.zeros((x.shape[0], max(missing, 0), *x.shape[2:]), x.dtype))
    return jnp.concatenate(blocks, axis=1)


def _as_ring(rows: Array, seen: Array) -> Array:
    """Rows before the edge, oldest first, where the state's ring buffer has them."""
    count = rows.shape[1]
    if count == 0:
        return rows
    # Token number i lies in row i % count; the oldest row has number seen - count.
    index = (jnp.arange(count, dtype=jnp.int32)[None] - seen[:, None]) % count
    return jnp.take_along_axis(rows, index[:, :, None, None], axis=1)


def _decay(leaving_gates, segment_ids, before: Counters, window: int) -> Array:
    """What is left at the right edge of what the slots held at the left one: [B, K, M]."""
    layout = segment_layout(segment_ids, before)
    written = (segment_ids > 0) & (layout.number >= window)
    total = jnp.sum(jnp.where(written[:, :, None, None], leaving_gates, 0), axis=1)
    restarts = jnp.any((segment_ids > 0) & (layout.start >= 0) & (layout.number == 0), axis=1)
    return jnp.where(restarts[:, None, None], 0, jnp.exp(total))


def _slots_before(decay, written, axis: str, parts: int) -> tuple[Array, ...]:
    """The slots at each device's left edge, from what every device does to them."""

    def from_left(x, distance: int):
        pairs = [(source, source + distance) for source in range(parts - distance)]
        return jax.lax.ppermute(x, axis, pairs)

    # Exclusive: a device starts from what the one to its left ends with. Where nothing arrives,
    # zeros do, and zero slots are what the first device starts from.
    decay, *slots = (from_left(x, 1) for x in (decay, *written))
    distance = 1
    while distance < parts - 1:
        earlier = [from_left(x, distance) for x in slots]
        slots = [x + decay[..., None] * before for x, before in zip(slots, earlier, strict=True)]
        decay = decay * from_left(decay, distance)
        distance *= 2
    return tuple(slots)
