"""The operator on Triton kernels: the forward pass, its gradients, and batching over both."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas.triton.backward_call import backward
from pallas.triton.calls import Inputs, Options
from pallas.triton.configs import KernelConfig, choose
from pallas.triton.forward_call import forward


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
    window: int | None | Int[Array, ""],
    scale: float,
    sink: bool,
    with_slots: bool,
    use_slots: bool,
    config: KernelConfig | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"], Float[Array, "B K M HV"] | None]:
    """Attends to slots and window with one softmax; differentiable.

    Token t is row t + P, P = S - T >= 0; it sees rows t+P-min(number_t, W-1) .. t+P exactly, and
    with number_t >= W the row t+P-W is written to the slots first:

        SK[m] <- exp(g[m]) SK[m] + (1 - exp(g[m])) slot_key,   SV likewise with value.

    Args:
        query: [B, T, N, H], rotated; bfloat16, float16 or float32, as all but `log_gate`.
        key: [B, S, K, H], rotated.
        value: [B, S, K, V].
        log_gate: [B, S, K, M] float32, at most 0.
        slot_query: [B, T, N, H].
        slot_key: [B, S, K, H].
        number: [B, T] int32, the token's number in its segment, history included; -1 at padding. A
            0 restarts the slots.
        initial_slots: [B, K, M, H+V] float32, or None for zeros.
        window: W >= 0, None for full attention, or a traced int32 scalar; one that is T or more is
            full attention. With a traced one P is 0.
        scale: Factor on all logits.
        sink: Whether slots are read, as zeros, before anything was written.
        with_slots: Whether to return the final slots.
        use_slots: Whether slots are read.
        config: Tiles; chosen by shape where None.

    Returns:
        (out [B, T, N, V], 0 at padding; share of the softmax mass on slots [B, T, N] float32; final
        slots [B, K, M, H+V] float32 or None).
    """
    length = query.shape[1]
    if window is None:
        width = jnp.full((), key.shape[1], jnp.int32)
        reads = jnp.zeros((), jnp.int32)
    elif isinstance(window, int):
        # Beyond all numbers nothing changes; a segment may be longer than S by its history.
        width = jnp.full((), min(window, 2**30), jnp.int32)
        reads = jnp.full((), int(use_slots), jnp.int32)
    else:
        width = jnp.clip(window, 0, length).astype(jnp.int32)
        reads = (use_slots & (window < length)).astype(jnp.int32)
    slots = with_slots or (use_slots and window is not None)
    if config is None:
        config = choose(query.dtype, key.shape[3], value.shape[3], log_gate.shape[3])
    group = query.shape[2] // key.shape[2]
    while group % config.heads:
        config = dataclasses.replace(config, heads=config.heads // 2)
    static = window if isinstance(window, int) else None
    options = Options(scale, sink, slots, with_slots, static, config)
    inputs = Inputs(query, key, value, log_gate, slot_query, slot_key, initial_slots)
    return _attention(options, inputs, number, jnp.stack([width, reads]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, inputs: Inputs, number, window):
    out, share, final, _ = _mapped(forward, options, window, inputs, number)
    return out, share, final


def _attention_forward(options, inputs, number, window):
    out, share, final, saved = _mapped(forward, options, window, inputs, number)
    return (out, share, final), (inputs, number, window, out, share, saved)


def _attention_backward(options, residuals, cotangents):
    inputs, number, window, out, share, saved = residuals
    gradients = _mapped(
        backward, options, window, inputs, number, out, share, saved, tuple(cotangents)
    )
    return gradients, None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _mapped(function: Callable, options: Options, window, *arrays):
    """Calls function(options, window, *arrays); under `vmap` the mapped axis joins the batch.

    All arrays but `window` lead with the batch axis, results too. With a mapped window the calls
    run one after another.
    """

    @jax.custom_batching.custom_vmap
    def call(window, arrays):
        return function(options, window, *arrays)

    @call.def_vmap
    def _(axis_size, in_batched, window, arrays):
        window_batched, arrays_batched = in_batched

        def leading(batched, x):
            return x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        arrays = jax.tree.map(leading, arrays_batched, arrays)
        if window_batched:
            results = jax.lax.map(lambda xs: call(*xs), (window, arrays))
        else:
            merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
            results = call(window, merged)
            results = jax.tree.map(
                lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), results
            )
        return results, jax.tree.map(lambda _: True, results)

    return call(window, arrays)
