"""The operator on kernels: alignment to tiles, the sequence of kernels, and its gradient."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas.mosaic import gates
from pallas.mosaic.backward_gates import write_gradient
from pallas.mosaic.backward_slots import slot_gradient, slot_sums
from pallas.mosaic.backward_window import window_key_gradient, window_query_gradient
from pallas.mosaic.config import MosaicConfig
from pallas.mosaic.forward import output
from pallas.mosaic.plan import FULL, Plan, make_plan
from pallas.mosaic.scan import scan
from pallas.mosaic.tiles import TILE

DEFAULT_CONFIG = MosaicConfig()


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a call is traced.

    Attributes:
        window: Tokens of the window; None for full attention, "traced" where it is an array.
        scale: Factor on all logits.
        sink: Whether empty slots take part in the softmax.
        num_slots: Slots that exist, without padding.
        reads: Whether slots are read.
        writes: Whether slots are written.
        near: Window tiles that are always read.
        far: Whether windows may reach beyond two tiles.
        history_tiles: Tiles of keys before the tokens.
        shift: Tile of the slot keys that chunk 0 writes.
        precise: Whether the backward pass makes delta (`backward_window`) for the slots anew, not
            from the output. The slots of a head resemble each other, so with few or no window
            logits beside them their gradients are differences, which the output's rounding spoils:
            at W = 0 it costs 1.3e-2 of the slot queries' gradient in bfloat16, at W = 16 2.5e-3.
        config: How to run.
    """

    window: int | None | str
    scale: float
    sink: bool
    num_slots: int
    reads: bool
    writes: bool
    near: int
    far: bool
    history_tiles: int
    shift: int
    precise: bool
    config: MosaicConfig


# Windows below this need `Settings.precise`.
PRECISE_WINDOW = 16


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    log_gate: Float[Array, "B S K M"],
    slot_query: Float[Array, "B T N H"],
    slot_key: Float[Array, "B S K H"],
    number: Int[Array, "B T"],
    initial_slots: Float[Array, "B K M HV"] | None,
    *,
    window: int | None | Array,
    scale: float,
    sink: bool,
    with_slots: bool,
    use_slots: bool,
    config: MosaicConfig = DEFAULT_CONFIG,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"], Float[Array, "B K M HV"] | None]:
    """Native hybrid attention of T tokens after S - T tokens of history.

    Token t is row t + S - T of the keys. It sees the rows of its segment among the last `window`,
    and slots, which the token that leaves the window is written to:

        S[m] <- exp(g_e[m]) S[m] + (1 - exp(g_e[m])) (slot_key_e, value_e),   e = t - window

    One softmax runs over slot logits `scale * slot_query . S` and window logits
    `scale * query . key`. Differentiable in everything but `number` and `window`.

    Args:
        query: Rotated, bfloat16 or float16. All arrays are 0 at padding.
        key: Rotated.
        value: Values.
        log_gate: float32, at most 0.
        slot_query: Queries of the slots.
        slot_key: Keys that are written to the slots.
        number: int32, each token's number in its segment, history included; -1 at padding.
        initial_slots: float32, where a segment that goes on starts from; None for zeros.
        window: Static, None for full attention, or an int32 scalar array (then S = T).
        scale: Factor on all logits.
        sink: Whether empty slots take part as zeros instead of being masked.
        with_slots: Whether to return the slots after the last token.
        use_slots: Whether any token reads slots.
        config: How to run.

    Returns:
        (output in the inputs' dtype, slot share in float32, final slots in float32 or None).
    """
    batch, length, _, width = query.shape
    value_width = value.shape[3]
    num_slots = log_gate.shape[3]
    history = key.shape[1] - length
    fixed = window if isinstance(window, int) else None
    traced = None if window is None or isinstance(window, int) else window
    no_slots = window is None or num_slots == 0
    reads = use_slots and not no_slots
    writes = reads or (with_slots and not no_slots)

    tokens_end = -length % TILE
    history_tiles = -(-history // TILE)
    front = history_tiles * TILE - history

    def tokens(x):
        return _pad(x, 0, tokens_end, TILE)

    def keys(x):
        return _pad(x, front, tokens_end, TILE)

    shift = 0
    if fixed is not None and (history_tiles * TILE - fixed) % TILE == 0:
        # The tile that leaves is a tile of the keys: nothing is copied.
        shift = history_tiles - fixed // TILE
        leaving = keys
    else:

        def leaving(x):
            """Row t is the token that leaves the window at time t."""
            before = length if fixed is None else min(max(fixed - history, 0), length)
            x = jnp.pad(x, ((0, 0), (before, 0), (0, 0), (0, 0)))
            first: Any = 0 if fixed is None else max(history - fixed, 0)
            if traced is not None:
                first = length - jnp.clip(traced, 0, length)
            x = jax.lax.dynamic_slice_in_dim(x, first, length, axis=1)
            return _pad(x, 0, tokens_end, TILE)

    longest = key.shape[1] + front + tokens_end
    reach = longest if fixed is None else min(fixed, longest)
    settings = Settings(
        window=fixed if traced is None else "traced",
        scale=float(scale),
        sink=bool(sink),
        num_slots=num_slots,
        reads=reads,
        writes=writes,
        near=min(reach, 2),
        far=reach > TILE + 1 and longest > 2 * TILE,
        history_tiles=history_tiles,
        shift=shift,
        precise=reads and (fixed is None or fixed < PRECISE_WINDOW),
        config=config,
    )
    slots = None
    if writes:
        if initial_slots is None:
            shape = (batch, key.shape[2], num_slots, width + value_width)
            initial_slots = jnp.zeros(shape, jnp.float32)
        slots = _pad_slots(initial_slots, width)
    number = jnp.pad(number, ((0, 0), (0, tokens_end)), constant_values=-1)
    out, share, final = _run(
        settings,
        tokens(query),
        keys(key),
        keys(value),
        tokens(slot_query) if reads else None,
        leaving(slot_key) if writes else None,
        leaving(value) if writes else None,
        leaving(log_gate.astype(jnp.float32)) if writes else None,
        slots,
        number,
        # A traced window that covers the call is full attention, whatever the padding to tiles.
        None if traced is None else jnp.where(traced < length, traced, FULL).astype(jnp.int32),
    )
    out = out[:, :length, :, :value_width]
    share = share[:, :length]
    if not with_slots:
        return out, share, None
    if not writes:
        shape = (batch, key.shape[2], num_slots, width + value_width)
        final = jnp.zeros(shape, jnp.float32) if initial_slots is None else initial_slots
        return out, share, final
    key_part = final[:, :, :num_slots, :width]
    first_value = width + -width % TILE
    value_part = final[:, :, :num_slots, first_value : first_value + value_width]
    return out, share, jnp.concatenate([key_part, value_part], axis=-1)


def _pad(x, front, end, multiple):
    """Zero rows on axis 1, and the last axis brought to a multiple."""
    last = -x.shape[-1] % multiple
    if not (front or end or last):
        return x
    return jnp.pad(x, ((0, 0), (front, end), (0, 0), (0, last)))


def _pad_slots(slots, width):
    """Pads slots, key part and value part of [B, K, M, H + V] to multiples of the tile."""
    key, value = slots[..., :width], slots[..., width:]

    def pad(x):
        last = [-size % TILE for size in x.shape[2:]]
        return jnp.pad(x, ((0, 0), (0, 0), (0, last[0]), (0, last[1])))

    return jnp.concatenate([pad(key), pad(value)], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(settings, query, key, value, slot_query, slot_key, slot_value, log_gate, initial, number,
         window):  # fmt: skip
    """(out, slot share [B, T, N], final slots or None), all sizes multiples of the tile."""
    results, _ = _forward(
        settings, query, key, value, slot_query, slot_key, slot_value, log_gate, initial, number,
        window,
    )  # fmt: skip
    return results


def _plan(settings: Settings, number, window) -> Plan:
    if settings.window != "traced":
        window = settings.window
    return make_plan(number, window, sink=settings.sink, history_tiles=settings.history_tiles)


def _forward(settings: Settings, query, key, value, slot_query, slot_key, slot_value, log_gate,
             initial, number, window):  # fmt: skip
    plan = _plan(settings, number, window)
    config = settings.config
    factors = middle = exact = states = final = None
    if settings.writes:
        sums = gates.chunk_sums(log_gate, plan, shift=settings.shift)
        exact = gates.is_exact(sums, query.dtype)
        middle = gates.reference(sums, exact)
        prepared = gates.prepare(
            log_gate, slot_key, slot_value, plan, middle, exact,
            shift=settings.shift, backward=False,
        )  # fmt: skip
        factors = prepared["factor"]
        retained = jnp.exp(sums) * plan.kept[:, :, None, None]
        states, final = scan(
            prepared["added"], retained, initial,
            reverse=False, dtype=query.dtype, config=config,
        )  # fmt: skip
    if not settings.reads:
        factors = None
    out, lse, share = output(
        query, key, value, slot_query, slot_key, slot_value, factors, middle, exact, states, plan,
        num_slots=settings.num_slots, scale=settings.scale, near=settings.near, far=settings.far,
        history_tiles=settings.history_tiles, shift=settings.shift, config=config,
    )  # fmt: skip
    share = jnp.swapaxes(share, 1, 2)
    saved = (
        query, key, value, slot_query, slot_key, slot_value, log_gate, number, window, out,
        share, lse, states,
    )  # fmt: skip
    return (out, share, final), saved


def _backward(settings: Settings, saved, cotangents):
    (
        query, key, value, slot_query, slot_key, slot_value, log_gate, number, window, out,
        share, lse, states,
    ) = saved  # fmt: skip
    out_gradient, share_gradient, final_gradient = cotangents
    plan = _plan(settings, number, window)
    config = settings.config
    num_kv_heads = value.shape[2]
    wide = jnp.float32
    delta = jnp.sum(out_gradient.astype(wide) * out.astype(wide), axis=-1)
    share_gradient = share_gradient.astype(wide)
    delta += share_gradient * share
    delta = jnp.swapaxes(delta, 1, 2)

    query_gradient, along = jnp.zeros_like(query), jnp.zeros_like(delta)
    key_gradient, value_gradient = jnp.zeros_like(key), jnp.zeros_like(value)
    if settings.near:
        window_arguments = (query, key, value, out_gradient, lse, delta, plan)
        query_gradient, along = window_query_gradient(
            *window_arguments, scale=settings.scale, near=settings.near, far=settings.far,
            history_tiles=settings.history_tiles, config=config,
        )  # fmt: skip
        key_gradient, value_gradient = window_key_gradient(
            *window_arguments, scale=settings.scale, history_tiles=settings.history_tiles,
            config=config,
        )  # fmt: skip
    gradients = [query_gradient, key_gradient, value_gradient]
    if not settings.writes:
        return (*gradients, None, None, None, None, None, None, None)

    sums = gates.chunk_sums(log_gate, plan, shift=settings.shift)
    exact = gates.is_exact(sums, query.dtype)
    middle = gates.reference(sums, exact)
    retained = jnp.exp(sums) * plan.kept[:, :, None, None]
    # The factors are made again: keeping them would cost more memory than all else together.
    prepared = gates.prepare(
        log_gate, slot_key, slot_value, plan, middle, exact,
        shift=settings.shift, backward=True,
    )  # fmt: skip
    reads = slot_query_gradient = None
    if settings.reads:
        slot_arguments = (
            slot_query, slot_key, slot_value, out_gradient, jnp.swapaxes(share_gradient, 1, 2), lse,
        )  # fmt: skip
        gate_arguments: Any = (prepared["factor"], middle, exact, states, plan)
        choices: dict[str, Any] = dict(
            num_slots=settings.num_slots, scale=settings.scale, shift=settings.shift, config=config
        )
        if settings.precise:
            measured = slot_gradient(
                *slot_arguments, delta, *gate_arguments, measure=True, **choices
            )
            delta = along + jnp.sum(measured["along"], axis=0)
        reads = slot_gradient(*slot_arguments, delta, *gate_arguments, measure=False, **choices)
        slot_query_gradient = jnp.sum(reads["query"], axis=0).astype(query.dtype)
        direct, reads["key"], reads["value"] = slot_sums(
            slot_query, out_gradient, reads["matrices"], num_kv_heads=num_kv_heads, config=config
        )
    else:
        direct = jnp.zeros(states.shape, wide)
    state_gradients, initial_gradient = scan(
        direct, retained, final_gradient, reverse=True, dtype=query.dtype, config=config
    )
    slot_key_gradient, slot_value_gradient, gate_gradient = write_gradient(
        log_gate, slot_key, slot_value, prepared["weight"], states, state_gradients, retained,
        reads, plan, shift=settings.shift,
    )  # fmt: skip

    def placed(x, like):
        """From the chunk that writes a token to the token's own row."""
        x = x.astype(like.dtype)
        first = settings.shift * TILE
        last = like.shape[1] - first - x.shape[1]
        none = (0, 0, 0)
        return jax.lax.pad(x, jnp.zeros((), x.dtype), (none, (first, last, 0), none, none))

    return (
        *gradients,
        slot_query_gradient,
        placed(jnp.sum(slot_key_gradient, axis=0), slot_key),
        placed(jnp.sum(slot_value_gradient, axis=0), slot_value),
        placed(gate_gradient, log_gate),
        initial_gradient,
        None,
        None,
    )


_run.defvjp(_forward, _backward)
