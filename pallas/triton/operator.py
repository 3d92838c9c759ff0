"""The operator on Triton kernels: the forward pass, its gradients, and batching over both."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas.triton import forward, states
from pallas.triton.configs import KernelConfig, block, choose, precision
from pallas.triton.launch import Shape, launch


@dataclasses.dataclass(frozen=True)
class Options:
    """Static facts of one call.

    Attributes:
        scale: Factor on all logits.
        sink: Whether empty slots take part as zeros.
        slots: Whether slots exist at all: whether they are read or the final ones asked for.
        with_slots: Whether the final slots are returned.
        config: Tiles.
    """

    scale: float
    sink: bool
    slots: bool
    with_slots: bool
    config: KernelConfig


class Inputs(NamedTuple):
    """The differentiable arrays; letters as in `attention`."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    log_gate: Float[Array, "B S K M"]
    slot_query: Float[Array, "B T N H"]
    slot_key: Float[Array, "B S K H"]
    initial_slots: Float[Array, "B K M HV"] | None


class Memory(NamedTuple):
    """The slots in chunks, as the forward pass leaves them for the gradients."""

    before: Float[Array, "B n K M HV"]
    kept: Float[Array, "B n K M"]
    left: Float[Array, "B T K M"]
    right: Float[Array, "B T K M"]
    middle: Float[Array, "B n K M"]
    exact: Int[Array, "B n K"]


class Sizes(NamedTuple):
    """All sizes of one call."""

    B: int
    T: int
    P: int
    N: int
    K: int
    H: int
    V: int
    M: int
    chunks: int

    @classmethod
    def of(cls, inputs: Inputs, config: KernelConfig) -> "Sizes":
        B, T, N, H = inputs.query.shape
        S, K, V = inputs.value.shape[1:]
        return cls(B, T, S - T, N, K, H, V, inputs.log_gate.shape[3], -(-T // config.chunk))

    @property
    def blocks(self) -> dict[str, int]:
        """Tile widths."""
        return dict(BLOCK_H=block(self.H), BLOCK_V=block(self.V), BLOCK_M=block(self.M))


def operand_dtype(dtype) -> Any:
    """What states and decay factors are stored in: bfloat16 for such inputs, else float32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


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
    options = Options(scale, sink, slots, with_slots, config)
    inputs = Inputs(query, key, value, log_gate, slot_query, slot_key, initial_slots)
    return _attention(options, inputs, number, jnp.stack([width, reads]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, inputs: Inputs, number, window):
    out, share, final, _ = _forward(options, inputs, number, window)
    return out, share, final


def _attention_forward(options, inputs, number, window):
    out, share, final, saved = _forward(options, inputs, number, window)
    return (out, share, final), (inputs, number, window, out, share, saved)


def _attention_backward(options, residuals, cotangents):
    raise NotImplementedError


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(options: Options, inputs: Inputs, number, window):
    """Returns (out, share, final slots or None, (log-sum-exp, memory or None))."""
    memory, final = None, None
    if options.slots:
        memory, final = _memory(options, inputs, number, window)
    out, lse, share = _output(options, inputs, number, window, memory)
    return out, share, final if options.with_slots else None, (lse, memory)


def _memory(options: Options, inputs: Inputs, number, window):
    """Slots before each chunk with all decay factors, and the final slots."""
    config = options.config
    size = Sizes.of(inputs, config)
    kind = operand_dtype(inputs.query.dtype)
    per_chunk = (size.B, size.chunks, size.K)
    per_token = (size.B, size.T, size.K, size.M)
    width = size.H + size.V
    written, kept, left, right, middle, exact = launch(
        states.contributions,
        (size.K, size.chunks, size.B),
        [inputs.slot_key, inputs.value, inputs.log_gate, number, window, size.T, size.P],
        [
            Shape((*per_chunk, size.M, width), kind),
            Shape((*per_chunk, size.M), jnp.float32),
            Shape(per_token, kind),
            Shape(per_token, kind),
            Shape((*per_chunk, size.M), jnp.float32),
            Shape(per_chunk, jnp.int32),
        ],
        dict(
            K=size.K,
            H=size.H,
            V=size.V,
            M=size.M,
            C=config.chunk,
            BLOCK_M=block(size.M),
            SLICE=min(128, max(block(size.H), block(size.V))),
            LIMIT=config.limit,
            PRECISION=precision(inputs.query.dtype),
        ),
        num_warps=config.warps,
        num_stages=1,
    )
    initial = inputs.initial_slots
    if initial is None:
        initial = jnp.zeros((size.B, size.K, size.M, width), jnp.float32)
    before, final = scan(written, kept, initial, config, reverse=False)
    return Memory(before, kept, left, right, middle, exact), final


def scan(written, kept, initial, config: KernelConfig, *, reverse: bool):
    """The first-order scan over chunks: (state before each chunk, final state)."""
    B, chunks, K, M, width = written.shape
    return launch(
        states.scan,
        (-(-M * width // config.scan_block), K, B),
        [written, kept, initial, chunks],
        [Shape(written.shape, written.dtype), Shape(initial.shape, jnp.float32)],
        dict(K=K, M=M, WIDTH=width, BLOCK=config.scan_block, REVERSE=reverse, STAGES=4),
        num_warps=4,
        num_stages=4,
    )


def _output(options: Options, inputs: Inputs, number, window, memory: Memory | None):
    """(out, log-sum-exp, slot share)."""
    config = options.config
    size = Sizes.of(inputs, config)
    if memory is None:  # pointers that the kernel does not look at
        memory = Memory(*[number] * len(Memory._fields))
    return launch(
        forward.output,
        (size.N // config.heads, size.chunks, size.B),
        [
            *inputs[:6],
            number,
            window,
            memory.before,
            memory.left,
            memory.right,
            memory.middle,
            memory.exact,
            size.T,
            size.P,
        ],
        [
            Shape((size.B, size.T, size.N, size.V), inputs.value.dtype),
            Shape((size.B, size.T, size.N), jnp.float32),
            Shape((size.B, size.T, size.N), jnp.float32),
        ],
        dict(
            N=size.N,
            K=size.K,
            H=size.H,
            V=size.V,
            M=size.M,
            C=config.chunk,
            LEVELS=config.levels,
            HEADS=config.heads,
            SCALE=options.scale,
            SINK=options.sink,
            SLOTS=options.slots,
            PRECISION=precision(inputs.query.dtype),
            **size.blocks,
        ),
        num_warps=config.warps,
        num_stages=config.stages,
    )
