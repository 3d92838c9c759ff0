"""What the kernels share on the device: products, gates, and decay inside a chunk.

Letters: C positions of a chunk, M slots, R rows of queries (several heads of a group times C tokens).
Position t of a chunk holds the token that leaves the window at time t, so everything here is in
*shifted* time: writer j and reader t of one chunk, j <= t, are apart by the gates of (j, t].

Decay is exact for any gates: a chunk is halved again and again. Writer and reader are separated by
the middle of exactly one block, and

    exp(gates in (j, t]) = exp(gates in (j, middle)) * exp(gates in [middle, t]),

both exponents being sums of the gates that are really passed, never a difference. Where all sums of
a chunk are small, one reference in the middle of the sum serves all pairs at once (`fast`).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for log(0): finite, so that differences of two of them are not NaN.
EMPTY = tl.constexpr(-1.0e30)
# exp of this is 0 in float32; keeps sums of gates finite.
LOWEST_GATE = tl.constexpr(-1.0e4)


@triton.jit
def narrowed(x, PRECISION: tl.constexpr):
    """Converts an operand to what products take: bfloat16 as such, all else as float32."""
    if PRECISION == "bf16":
        result = x.to(tl.bfloat16)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """A @ b, accumulated in float32."""
    if PRECISION == "bf16":
        result = tl.dot(narrowed(a, PRECISION), narrowed(b, PRECISION))
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return result


@triton.jit
def product_onto(a, b, onto, PRECISION: tl.constexpr):
    """Onto + a @ b."""
    if PRECISION == "bf16":
        result = tl.dot(narrowed(a, PRECISION), narrowed(b, PRECISION), onto)
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), onto, input_precision=PRECISION)
    return result


@triton.jit
def summed(mask, x):
    """Sums of rows of float32 `x` chosen by a mask [R, C]; exact to float32's last digits."""
    return tl.dot(mask.to(tl.float32), x, input_precision="tf32x3")


@triton.jit
def rows_of(pointer, row, keep, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows of WIDTH elements as a tile [R, BLOCK]; 0 where not kept and past the width.

    `row` counts rows in int64.
    """
    column = tl.arange(0, BLOCK)
    mask = keep[:, None]
    if WIDTH != BLOCK:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(pointer + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, row, keep, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a tile [R, BLOCK] into rows of WIDTH elements."""
    column = tl.arange(0, BLOCK)
    mask = keep[:, None]
    if WIDTH != BLOCK:
        mask = mask & (column < WIDTH)[None, :]
    at = pointer + row[:, None] * WIDTH + column[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def gates_of(log_gate, row, keep, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Gates as float32; 0 (no decay, no writing) where nothing is written."""
    return tl.maximum(rows_of(log_gate, row, keep, M, BLOCK_M).to(tl.float32), LOWEST_GATE)


@triton.jit
def write_strength(g):
    """1 - exp(g), accurate near g = 0."""
    near = tl.maximum(g, -0.25)
    series = near * 0.16666667 + 1.0
    series = near * 0.2 * series + 1.0
    series = near * 0.25 * series + 1.0
    series = near * 0.33333334 * series + 1.0
    series = near * 0.5 * series + 1.0
    return tl.where(g > -0.25, -near * series, 1.0 - tl.exp(g))


@triton.jit
def level_factor(log_gate, position, half, C: tl.constexpr):
    """Decay between each position and the middle of its block of 2 * half positions, [X, M].

    For the left half it is that of a writer, exp(gates in (position, middle)), for the right half
    that of a reader, exp(gates in [middle, position]).
    """
    passed = tl.arange(0, C)[None, :]
    place = position[:, None]
    middle = place // (2 * half) * (2 * half) + half
    reader = (passed >= middle) & (passed <= place)
    writer = (passed > place) & (passed < middle)
    return tl.exp(summed(reader | writer, log_gate))


@triton.jit
def in_right_half(position, half):
    """Whether positions lie in the right half of their block of 2 * half positions."""
    return position % (2 * half) >= half


@triton.jit
def in_one_block(reader, writer, half):
    """Mask [R, C]: reader and writer lie in one block of 2 * half positions."""
    return (reader // (2 * half))[:, None] == (writer // (2 * half))[None, :]


@triton.jit
def exact_spread(
    products, log_gate, strength, t, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr
):
    """sum_j products[t, j] * decay[t, j, m] * strength[j, m] for any gates: [R, C] -> [R, M]."""
    j = tl.arange(0, C)
    result = product(tl.where(t[:, None] == j[None, :], products, 0.0), strength, PRECISION)
    half = C // 2
    for _ in range(LEVELS):
        left = level_factor(log_gate, j, half, C) * strength
        left = tl.where(in_right_half(j, half)[:, None], 0.0, left)
        right = level_factor(log_gate, t, half, C)
        right = tl.where(in_right_half(t, half)[:, None], right, 0.0)
        near = tl.where(in_one_block(t, j, half), products, 0.0)
        result += right * product(near, left, PRECISION)
        half = half // 2
    return result


@triton.jit
def exact_collect(
    weights, log_gate, strength, t, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr
):
    """sum_m weights[t, m] * decay[t, j, m] * strength[j, m] for any gates: [R, M] -> [R, C]."""
    j = tl.arange(0, C)
    result = product(weights, tl.trans(strength), PRECISION)
    result = tl.where(t[:, None] == j[None, :], result, 0.0)
    half = C // 2
    for _ in range(LEVELS):
        left = level_factor(log_gate, j, half, C) * strength
        left = tl.where(in_right_half(j, half)[:, None], 0.0, left)
        right = level_factor(log_gate, t, half, C)
        right = tl.where(in_right_half(t, half)[:, None], right, 0.0)
        near = product(weights * right, tl.trans(left), PRECISION)
        result += tl.where(in_one_block(t, j, half), near, 0.0)
        half = half // 2
    return result
