"""Launches of the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas.triton import backward_slots, backward_window
from pallas.triton.calls import Inputs, Memory, Options, Sizes
from pallas.triton.configs import block, precision
from pallas.triton.forward_call import scan_chunks
from pallas.triton.launch import Shape, launch

# Up to this many rows the window's share of the softmax may be too small for the simple delta.
SMALL_WINDOW = 4


def backward(
    options: Options, window, inputs: Inputs, number, out, share, saved, cotangents
) -> Inputs:
    """Gradients of all inputs, from the cotangents of (out, slot share, final slots or None)."""
    lse, memory = saved
    out_grad, share_grad, final_grad = cotangents
    delta = _deltas(options, window, inputs, number, (lse, out, share, out_grad, share_grad))
    slot_query, log_gate, slot_key = (
        jnp.zeros_like(x) for x in (inputs.slot_query, inputs.log_gate, inputs.slot_key)
    )
    slot_value = initial = None
    if memory is not None:
        softmax = (lse, delta, share_grad, out_grad)
        slot_query, delta, written, initial = _slot_gradients(
            options, window, inputs, number, memory, softmax, final_grad
        )
        slot_key, slot_value, log_gate = (
            _unshifted(x, inputs.key.shape[1], window) for x in written
        )
    query, key, value = _window_gradients(options, window, inputs, number, (lse, delta, out_grad))
    if slot_value is not None:
        value = (value + slot_value).astype(inputs.value.dtype)
    if inputs.initial_slots is None:
        initial = None
    elif initial is None:
        initial = jnp.zeros_like(inputs.initial_slots)
    return Inputs(query, key, value, log_gate, slot_query, slot_key, initial)


def _unshifted(gradient, rows: int, window):
    """From [B, T, ...] by time of writing to [B, S, ...] by row: t wrote row t + P - W."""
    length = gradient.shape[1]
    # With P rows of history W is P, or T + P and more, where nothing was written.
    shift = jnp.minimum(window[0] - (rows - length), length)
    padded = jnp.pad(gradient, ((0, 0), (0, rows), (0, 0), (0, 0)))
    start = jnp.asarray(shift, jnp.int32)
    return jax.lax.dynamic_slice_in_dim(padded, start, rows, axis=1)


def _window_constants(options: Options, inputs: Inputs, size: Sizes) -> dict[str, Any]:
    return dict(
        N=size.N,
        K=size.K,
        H=size.H,
        V=size.V,
        C=options.config.chunk,
        BLOCK_H=block(size.H),
        BLOCK_V=block(size.V),
        SCALE=options.scale,
        PRECISION=precision(inputs.query.dtype),
    )


def _deltas(options: Options, window, inputs: Inputs, number, arrays):
    config = options.config
    size = Sizes.of(inputs, config)
    (delta,) = launch(
        backward_window.deltas,
        (size.N, size.chunks, size.B),
        [*inputs[:3], number, window, *arrays, size.T, size.P],
        [Shape((size.B, size.T, size.N), jnp.float32)],
        _window_constants(options, inputs, size) | dict(SMALL=SMALL_WINDOW),
        num_warps=config.warps,
        num_stages=1,
    )
    return delta


def _window_gradients(options: Options, window, inputs: Inputs, number, softmax):
    config = options.config
    size = Sizes.of(inputs, config)
    lse, delta, out_grad = softmax
    rows = size.T + size.P
    common = _window_constants(options, inputs, size)
    (query,) = launch(
        backward_window.queries,
        (size.N, size.chunks, size.B),
        [*inputs[:3], number, window, lse, delta, out_grad, size.T, size.P],
        [Shape(inputs.query.shape, inputs.query.dtype)],
        common,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    key, value = launch(
        backward_window.keys_values,
        (size.K, -(-rows // config.chunk), size.B),
        [
            *inputs[:3],
            number,
            _last_rows(number, size.P),
            window,
            lse,
            delta,
            out_grad,
            size.T,
            size.P,
        ],
        [Shape(inputs.key.shape, inputs.key.dtype), Shape(inputs.value.shape, jnp.float32)]
        if options.slots
        else [Shape(x.shape, x.dtype) for x in (inputs.key, inputs.value)],
        common,
        num_warps=config.heavy_warps,
        num_stages=config.stages,
    )
    return query, key, value


def _last_rows(number, history: int):
    """The last row of the segment that each row is in, [B, P + T]."""
    length = number.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    restart = jnp.where(number == 0, index, length)
    following = jax.lax.cummin(restart, axis=1, reverse=True)
    following = jnp.pad(following, ((0, 0), (0, 1)), constant_values=length)
    before = jnp.repeat(following[:, :1], history, axis=1)
    return jnp.concatenate([before, following[:, 1:]], axis=1) - 1 + history


def _slot_gradients(options, window, inputs: Inputs, number, memory: Memory, softmax, final_grad):
    """(slot query's; delta; slot key's, value's, gate's by time of writing; initial slots')."""
    config = options.config
    size = Sizes.of(inputs, config)
    kind = memory.before.dtype
    lse, delta, share_grad, out_grad = softmax
    key, value, log_gate = inputs.slot_key, inputs.value, inputs.log_gate
    common: dict[str, Any] = dict(
        N=size.N,
        K=size.K,
        H=size.H,
        V=size.V,
        M=size.M,
        C=config.chunk,
        LEVELS=config.levels,
        BLOCK_M=block(size.M),
        PRECISION=precision(inputs.query.dtype),
    )
    tiles = (size.B, size.chunks, size.N, config.chunk, config.chunk + block(size.M))
    per_gate = (size.B, size.T, size.K, size.M)
    widths = dict(
        SLICE_H=min(config.width, block(size.H)), SLICE_V=min(config.width, block(size.V))
    )
    slot_query, key_tiles, value_tiles, full_delta = launch(
        backward_slots.readers,
        (size.K, size.chunks, size.B),
        [
            value,
            inputs.slot_query,
            key,
            number,
            window,
            memory.before,
            memory.factors,
            memory.exact,
            lse,
            delta,
            share_grad,
            out_grad,
            size.T,
            size.P,
        ],
        [
            Shape(inputs.slot_query.shape, inputs.slot_query.dtype),
            Shape(tiles, kind),
            Shape(tiles, kind),
            Shape(lse.shape, jnp.float32),
        ],
        common
        | widths
        | dict(SCALE=options.scale, SINK=options.sink, STAGES=config.stages, SMALL=SMALL_WINDOW),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    (gate_inside,) = launch(
        backward_slots.gates,
        (size.K, size.chunks, size.B),
        [
            value,
            log_gate,
            inputs.slot_query,
            key,
            number,
            window,
            memory.before,
            memory.factors,
            memory.exact,
            out_grad,
            key_tiles,
            value_tiles,
            size.T,
            size.P,
        ],
        [Shape(per_gate, jnp.float32)],
        common | widths | dict(STAGES=config.stages),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    key_inside, value_inside, state_grad = launch(
        backward_slots.head_products,
        (2 * size.K, size.chunks, size.B),
        [inputs.slot_query, out_grad, number, key_tiles, value_tiles, memory.factors, size.T],
        [
            Shape((size.B, size.T, size.K, size.H), jnp.float32),
            Shape((size.B, size.T, size.K, size.V), jnp.float32),
            Shape(memory.before.shape, kind),
        ],
        common
        | dict(
            BLOCK_H=block(size.H),
            BLOCK_V=block(size.V),
            SLICE=min(config.width, max(block(size.H), block(size.V))),
            STAGES=config.stages,
        ),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if final_grad is None:
        final_grad = jnp.zeros((size.B, size.K, size.M, size.H + size.V), jnp.float32)
    after, initial = scan_chunks(state_grad, memory.kept, final_grad, config, reverse=True)
    written = launch(
        backward_slots.writers,
        (size.K, size.chunks, size.B),
        [
            key,
            value,
            log_gate,
            number,
            window,
            memory.before,
            memory.kept,
            after,
            key_inside,
            value_inside,
            gate_inside,
            size.T,
            size.P,
        ],
        [
            Shape((size.B, size.T, size.K, size.H), key.dtype),
            Shape((size.B, size.T, size.K, size.V), jnp.float32),
            Shape(per_gate, jnp.float32),
        ],
        {name: x for name, x in common.items() if name not in ("N", "LEVELS")}
        | dict(SLICE=min(64, max(block(size.H), block(size.V)))),
        num_warps=config.heavy_warps,
        num_stages=1,
    )
    return slot_query, full_delta, written, initial
