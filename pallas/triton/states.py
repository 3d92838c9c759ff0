"""States at chunk starts: what each chunk writes, the scan over chunks, and the scan backwards.

The chunks' own contributions are independent of each other and computed at once; only the
first-order scan over them is sequential in time, and it is parallel over everything else.
"""

import triton
import triton.language as tl

from pallas.triton.arithmetic import (
    LEAST_STRENGTH,
    gates_of,
    level_factor,
    narrowed,
    product,
    rows_of,
    store_rows,
    summed,
    write_strength,
)


@triton.jit
def contributions(
    slot_key,
    value,
    log_gate,
    number,
    window,
    T,
    P,
    written,
    kept,
    factors,
    exact,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What one chunk adds to the slots of one kv head, and its decay factors.

    With w_j the gates from writer j to the chunk's end,

        written[m] = sum_j exp(w_j[m]) s_j[m] (slot_key_j, value_j),   kept[m] = exp(sum of gates),

    restricted to the segment that is open at the chunk's end. `factors` [LEVELS + 3, C, M] holds, for
    chunks whose sums of gates stay above -LIMIT, s_j exp(R - G_j) in tile 0 and exp(G_t - R) in tile
    1, with R half the sum of the segment's gates in the chunk. Chunks flagged in `exact` hold in tile i the factors of level i (a
    writer's with its strength), in tile LEVELS the strengths, in the next 1. The last tile is the
    decay of the state before the chunk, 0 for another segment.

    Roofline (B=1, K=8, H=V=128, M=64, bf16, T=32768): reads slot_key, value 2 x 67 MB and gates
    67 MB, writes 134 MB of contributions and 2 x 34 MB of factors: 0.40 GB, 0.10 ms at 4.2 TB/s;
    4 M H T K = 8.6 GFLOP, 0.01 ms. Bound by memory.
    """
    k = tl.program_id(0)
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    w = tl.load(window)
    j = tl.arange(0, C)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    leaves = n >= w
    row = (b * (T + P) + t + P - w) * K + k
    g = gates_of(log_gate, row, leaves, M, BLOCK_M)
    strength = tl.where(leaves[:, None], write_strength(g), 0.0)
    restart = (n == 0).to(tl.int32)
    segment = tl.cumsum(restart, 0)
    segments = tl.sum(restart, 0)

    m = tl.arange(0, BLOCK_M)
    total = tl.sum(g, 0)
    to_end = tl.exp(summed(j[None, :] > j[:, None], g))
    weight = to_end * strength * (segment == segments).to(tl.float32)[:, None]
    state = (b * tl.num_programs(1) + chunk) * K + k
    whole = tl.where(segments == 0, tl.exp(total), 0.0)
    tl.store(kept + state * M + m, whole, mask=m < M)

    # Sums inside the position's own segment: other segments do not touch a single bit of it.
    same = segment[:, None] == segment[None, :]
    running = summed(same & (j[None, :] <= j[:, None]), g)
    half_sum = summed(same, g) * 0.5
    is_exact = tl.min(tl.min(half_sum, 1), 0) * 2 < -LIMIT
    tl.store(exact + state, is_exact.to(tl.int32))
    row_0 = state * (LEVELS + 3) * C + j
    everywhere = j >= 0
    carry = tl.exp(running) * (segment == 0).to(tl.float32)[:, None]
    store_rows(factors, row_0 + (LEVELS + 2) * C, everywhere, carry, M, BLOCK_M)
    strength = tl.where(leaves[:, None], tl.maximum(strength, LEAST_STRENGTH), 0.0)
    if is_exact:
        half = C // 2
        for level in range(LEVELS):
            factor = level_factor(g, j, half, C)
            factor = tl.where((j % (2 * half) < half)[:, None], factor * strength, factor)
            store_rows(factors, row_0 + level * C, everywhere, factor, M, BLOCK_M)
            half = half // 2
        store_rows(factors, row_0 + LEVELS * C, everywhere, strength, M, BLOCK_M)
        one = tl.full([C, BLOCK_M], 1.0, tl.float32)
        store_rows(factors, row_0 + (LEVELS + 1) * C, everywhere, one, M, BLOCK_M)
    else:
        from_middle = running - half_sum
        store_rows(factors, row_0, everywhere, strength * tl.exp(-from_middle), M, BLOCK_M)
        store_rows(factors, row_0 + C, everywhere, tl.exp(from_middle), M, BLOCK_M)

    weight = tl.trans(narrowed(weight, PRECISION))
    into = written + (state * M + m[:, None]) * (H + V)
    for first in range(0, H, SLICE):
        column = first + tl.arange(0, SLICE)
        mask = leaves[:, None] & (column < H)[None, :]
        x = tl.load(slot_key + row[:, None] * H + column[None, :], mask=mask, other=0.0)
        y = product(weight, x, PRECISION).to(written.dtype.element_ty)
        tl.store(into + column[None, :], y, mask=(m < M)[:, None] & (column < H)[None, :])
    for first in range(0, V, SLICE):
        column = first + tl.arange(0, SLICE)
        mask = leaves[:, None] & (column < V)[None, :]
        x = tl.load(value + row[:, None] * V + column[None, :], mask=mask, other=0.0)
        y = product(weight, x, PRECISION).to(written.dtype.element_ty)
        tl.store(into + H + column[None, :], y, mask=(m < M)[:, None] & (column < V)[None, :])


@triton.jit
def scan(
    written,
    kept,
    initial,
    chunks,
    before,
    final,
    K: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """S <- kept * S + written over the chunks; `before` holds S before each chunk.

    Backwards it is the same recurrence of gradients: `before` then holds the gradient of the state
    after each chunk, `written` what the chunk itself adds to that of the state before it.

    Roofline (K=8, M=64, WIDTH=256, bf16, T=32768): 134 MB read, 134 MB written, 0.064 ms at
    4.2 TB/s; a chain of T/64 dependent steps, hidden by loads issued STAGES ahead.
    """
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < M * WIDTH
    m = element // WIDTH
    state = tl.load(initial + (b * K + k) * M * WIDTH + element, mask=inside, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = step
        if REVERSE:
            chunk = chunks - 1 - step
        at = (b * chunks + chunk) * K + k
        new = tl.load(written + at * M * WIDTH + element, mask=inside, other=0.0)
        keep = tl.load(kept + at * M + m, mask=inside, other=0.0)
        kind = before.dtype.element_ty
        tl.store(before + at * M * WIDTH + element, state.to(kind), mask=inside)
        state = state * keep + new.to(tl.float32)
    tl.store(final + (b * K + k) * M * WIDTH + element, state, mask=inside)
