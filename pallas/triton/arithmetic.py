"""What the kernels share on the device: products, gates, and decay inside a chunk.

Letters: C positions of a chunk, M slots, R rows of queries (several heads of a group times C
tokens). Position t of a chunk holds the token that leaves the window at time t, so everything here
is in *shifted* time: writer j and reader t of one chunk, j <= t, are apart by the gates of (j, t].

Decay is exact for any gates: a chunk is halved again and again. Writer and reader are separated by
the middle of exactly one block, and

    exp(gates in (j, t]) = exp(gates in (j, middle)) * exp(gates in [middle, t]),

both exponents being sums of the gates that are really passed, never a difference. Where all sums of
a chunk are small, one reference in the middle of the sum serves all pairs at once: one level
instead of log2(C) + 1. `contributions` decides by chunk and kv head and writes the factors;
everything else walks through the levels that it finds.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for log(0): finite, so that differences of two of them are not NaN.
EMPTY = tl.constexpr(-1.0e30)
# exp of this is 0 in float32; keeps sums of gates finite.
LOWEST_GATE = tl.constexpr(-1.0e4)
# Stands for a write strength of 0, so that a factor can be divided by it.
LEAST_STRENGTH = tl.constexpr(1.0e-30)


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
    """Sums of rows of float32 `x` [C, M] chosen by a mask [R, C], to float32's last digits.

    Three bfloat16 parts hold all 24 bits of a float32, and 0 and 1 are exact in it.
    """
    ones = mask.to(tl.float32).to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))


@triton.jit
def slice_of(
    pointer, row, keep, first, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Loads columns first .. first + BLOCK of rows [R] that are STRIDE apart and WIDTH wide.

    0 where a row is not kept and past the width. `row` counts rows in int64.
    """
    column = first + tl.arange(0, BLOCK)
    mask = keep[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(pointer + row[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)


@triton.jit
def rows_of(pointer, row, keep, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows of WIDTH elements as a tile [R, BLOCK]; 0 where not kept and past the width."""
    return slice_of(pointer, row, keep, 0, WIDTH, WIDTH, BLOCK)


@triton.jit
def rows_product(
    a,
    a_row,
    a_keep,
    b,
    b_row,
    b_keep,
    B_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of rows of two arrays, [R, X], SLICE columns of both at a time."""
    left = slice_of(a, a_row, a_keep, 0, WIDTH, WIDTH, SLICE)
    right = slice_of(b, b_row, b_keep, 0, B_STRIDE, WIDTH, SLICE)
    result = product(left, tl.trans(right), PRECISION)
    for first in range(SLICE, WIDTH, SLICE):
        left = slice_of(a, a_row, a_keep, first, WIDTH, WIDTH, SLICE)
        right = slice_of(b, b_row, b_keep, first, B_STRIDE, WIDTH, SLICE)
        result = product_onto(left, tl.trans(right), result, PRECISION)
    return result


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
def level_pairs(level, C: tl.constexpr, LEVELS: tl.constexpr):
    """Mask [C, C] of the (reader, writer) pairs that a level of an exact chunk serves.

    The levels serve blocks of C, C/2, .., 2 positions, reader right and writer left of the middle,
    and at last, level LEVELS, each position itself.
    """
    j = tl.arange(0, C)
    half = C >> (level + 1)
    block = tl.maximum(2 * half, 1)
    near = (j // block)[:, None] == (j // block)[None, :]
    across = (j % block >= half)[:, None] & (j % block < half)[None, :]
    return near & (across | (level == LEVELS))


@triton.jit
def right_slot(level, LEVELS: tl.constexpr):
    """The tile of an exact chunk's factors that holds those of the readers at a level."""
    return tl.where(level < LEVELS, level, LEVELS + 1)


@triton.jit
def factor_tile(
    factors,
    state,
    slot,
    position,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One tile of decay factors of a chunk, [R, M]; slot LEVELS + 2 holds those of the carry."""
    row = (state * (LEVELS + 3) + slot) * C + position
    return rows_of(factors, row, position >= 0, M, BLOCK_M)


@triton.jit
def spread(
    products,
    factors,
    state,
    onto,
    steps,
    EXACT: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Onto + sum_j products[t, j] decay[t, j, m] s[j, m]: [C, C] -> [C, M].

    `products` is 0 where the writer j comes after the reader t. `steps` is LEVELS + 1, known only
    when the kernel runs so that the compiler does not unroll the levels.
    """
    j = tl.arange(0, C)
    if EXACT:
        for level in tl.range(0, steps, disable_licm=True):
            left = factor_tile(factors, state, level, j, M, C, LEVELS, BLOCK_M)
            slot = right_slot(level, LEVELS)
            right = factor_tile(factors, state, slot, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
            near = tl.where(level_pairs(level, C, LEVELS), products, 0.0)
            onto += right * product(near, left, PRECISION)
    else:
        left = factor_tile(factors, state, 0, j, M, C, LEVELS, BLOCK_M)
        right = factor_tile(factors, state, 1, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
        onto += right * product(products, left, PRECISION)
    return onto


@triton.jit
def collect(
    weights,
    factors,
    state,
    steps,
    EXACT: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sum_m weights[t, m] decay[t, j, m] s[j, m]: [C, M] -> [C, C]; `spread` transposed.

    Of no meaning where the writer j comes after the reader t.
    """
    j = tl.arange(0, C)
    if EXACT:
        result = tl.zeros([C, C], tl.float32)
        for level in tl.range(0, steps, disable_licm=True):
            left = factor_tile(factors, state, level, j, M, C, LEVELS, BLOCK_M)
            slot = right_slot(level, LEVELS)
            right = factor_tile(factors, state, slot, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
            near = product(weights * right, tl.trans(left), PRECISION)
            result += tl.where(level_pairs(level, C, LEVELS), near, 0.0)
    else:
        left = factor_tile(factors, state, 0, j, M, C, LEVELS, BLOCK_M)
        right = factor_tile(factors, state, 1, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
        result = product(weights * right, tl.trans(left), PRECISION)
    return result
