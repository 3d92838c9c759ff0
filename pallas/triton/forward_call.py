"""Launches of the forward pass."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas.triton import output as output_kernel
from pallas.triton import states
from pallas.triton.calls import Inputs, Memory, Options, Sizes, operand_dtype
from pallas.triton.configs import KernelConfig, block, precision
from pallas.triton.launch import Shape, launch


def forward(
    options: Options, window, inputs: Inputs, number
) -> tuple[Array, Array, Array | None, tuple[Array, Memory | None]]:
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
    width = size.H + size.V
    written, kept, factors, exact = launch(
        states.contributions,
        (size.K, size.chunks, size.B),
        [inputs.slot_key, inputs.value, inputs.log_gate, number, window, size.T, size.P],
        [
            Shape((*per_chunk, size.M, width), kind),
            Shape((*per_chunk, size.M), jnp.float32),
            Shape((*per_chunk, config.levels + 3, config.chunk, size.M), kind),
            Shape(per_chunk, jnp.int32),
        ],
        dict(
            K=size.K,
            H=size.H,
            V=size.V,
            M=size.M,
            C=config.chunk,
            LEVELS=config.levels,
            BLOCK_M=block(size.M),
            SLICE=min(64, max(block(size.H), block(size.V))),
            LIMIT=config.limit,
            PRECISION=precision(inputs.query.dtype),
        ),
        num_warps=config.warps,
        num_stages=1,
    )
    initial = inputs.initial_slots
    if initial is None:
        initial = jnp.zeros((size.B, size.K, size.M, width), jnp.float32)
    before, final = scan_chunks(written, kept, initial, config, reverse=False)
    return Memory(before, kept, factors, exact), final


def _output(options: Options, inputs: Inputs, number, window, memory: Memory | None):
    """(out, log-sum-exp, slot share)."""
    config = options.config
    size = Sizes.of(inputs, config)
    if memory is None:  # pointers that the kernel does not look at
        memory = Memory(*[number] * len(Memory._fields))
    slice_v = min(config.width, block(size.V))
    # Tiles of the window stay in shared memory only where those of a whole head fit.
    short = options.window is not None and options.window <= config.chunk
    short = short and max(block(size.H), block(size.V)) <= config.width
    return launch(
        output_kernel.output,
        (size.N // config.heads * -(-size.V // slice_v), size.chunks, size.B),
        [
            *inputs[:6],
            number,
            window,
            memory.before,
            memory.factors,
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
            SHORT=short,
            SHARED=short and options.window == config.chunk,
            STAGES=config.stages,
            PRECISION=precision(inputs.query.dtype),
            BLOCK_M=block(size.M),
            SLICE_H=min(config.width, block(size.H)),
            SLICE_V=slice_v,
        ),
        num_warps=config.warps,
        num_stages=config.stages,
    )


def scan_chunks(
    written, kept, initial, config: KernelConfig, *, reverse: bool
) -> tuple[Array, Array]:
    """The first-order scan over chunks: (state before each chunk, final state)."""
    B, chunks, K, M, width = written.shape
    columns = min(config.scan_columns, block(width))
    rows = min(config.scan_rows, block(M))
    before, final = launch(
        states.scan,
        (-(-M // rows) * -(-width // columns), K, B),
        [written, kept, initial, chunks],
        [Shape(written.shape, written.dtype), Shape(initial.shape, jnp.float32)],
        dict(K=K, M=M, WIDTH=width, ROWS=rows, COLUMNS=columns, REVERSE=reverse),
        num_warps=4,
        num_stages=1,
    )
    return before, final
