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

    restricted to the segment that is open at the chunk's end. `factors` [LEVELS + 3, C, M] holds,
    for chunks whose sums of gates stay above -LIMIT, s_j exp(R - G_j) in tile 0 and exp(G_t - R) in
    tile 1, with R half the sum of the segment's gates in the chunk. Chunks flagged in `exact` hold
    in tile i the factors of level i (a writer's with its strength), in tile LEVELS the strengths,
    in the next 1. The last tile is the decay of the state before the chunk, 0 for another segment.

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
    if tl.sum((restart * (j > 0)), 0) == 0:
        half_sum = tl.zeros([C, BLOCK_M], tl.float32) + (total * 0.5)[None, :]
    else:
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
def _existing(inside, chunk, chunks):
    """A mask of elements, all False past the last chunk."""
    return inside & (tl.zeros(inside.shape, tl.int32) + chunk < chunks)


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """S <- kept * S + written over the chunks; `before` holds S before each chunk.

    Backwards it is the same recurrence of gradients: `before` then holds the gradient of the state
    after each chunk, `written` what the chunk itself adds to that of the state before it.

    Roofline (K=8, M=64, WIDTH=256, bf16, T=32768): 134 MB read, 134 MB written, 0.064 ms at
    4.2 TB/s. A chain of T/64 dependent steps: the loads of four chunks are issued while the four
    before them are worked on.
    """
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    k = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < M)[:, None] & (column < WIDTH)[None, :]
    element = m[:, None] * WIDTH + column[None, :]
    at = (b * K + k) * M * WIDTH + element
    state = tl.load(initial + at, mask=inside, other=0.0)
    step = K * M
    row = (b * chunks * K + k) * M
    if REVERSE:
        row += (b * 0 + chunks - 1) * step  # in int64, also where `chunks` is the constant 1
        step = -step
    in_m = m < M
    u0 = tl.load(written + row * WIDTH + element, mask=_existing(inside, 0, chunks), other=0.0)
    u1 = tl.load(
        written + (row + step) * WIDTH + element, mask=_existing(inside, 1, chunks), other=0.0
    )
    u2 = tl.load(
        written + (row + 2 * step) * WIDTH + element, mask=_existing(inside, 2, chunks), other=0.0
    )
    u3 = tl.load(
        written + (row + 3 * step) * WIDTH + element, mask=_existing(inside, 3, chunks), other=0.0
    )
    k0 = tl.load(kept + row + m, mask=_existing(in_m, 0, chunks), other=0.0)
    k1 = tl.load(kept + row + step + m, mask=_existing(in_m, 1, chunks), other=0.0)
    k2 = tl.load(kept + row + 2 * step + m, mask=_existing(in_m, 2, chunks), other=0.0)
    k3 = tl.load(kept + row + 3 * step + m, mask=_existing(in_m, 3, chunks), other=0.0)
    for chunk in range(0, chunks, 4):
        here = row
        row += 4 * step
        ahead = chunk + 4
        v0 = tl.load(
            written + row * WIDTH + element, mask=_existing(inside, ahead, chunks), other=0.0
        )
        v1 = tl.load(
            written + (row + step) * WIDTH + element,
            mask=_existing(inside, ahead + 1, chunks),
            other=0.0,
        )
        v2 = tl.load(
            written + (row + 2 * step) * WIDTH + element,
            mask=_existing(inside, ahead + 2, chunks),
            other=0.0,
        )
        v3 = tl.load(
            written + (row + 3 * step) * WIDTH + element,
            mask=_existing(inside, ahead + 3, chunks),
            other=0.0,
        )
        l0 = tl.load(kept + row + m, mask=_existing(in_m, ahead, chunks), other=0.0)
        l1 = tl.load(kept + row + step + m, mask=_existing(in_m, ahead + 1, chunks), other=0.0)
        l2 = tl.load(kept + row + 2 * step + m, mask=_existing(in_m, ahead + 2, chunks), other=0.0)
        l3 = tl.load(kept + row + 3 * step + m, mask=_existing(in_m, ahead + 3, chunks), other=0.0)
        tl.store(before + here * WIDTH + element, state.to(before.dtype.element_ty), mask=inside)
        state = state * k0[:, None] + u0.to(tl.float32)
        for index in tl.static_range(1, 4):
            exists = chunk + index < chunks
            to = before + (here + index * step) * WIDTH + element
            tl.store(
                to, state.to(before.dtype.element_ty), mask=_existing(inside, chunk + index, chunks)
            )
            if index == 1:
                keep = k1
                new = u1
            elif index == 2:
                keep = k2
                new = u2
            else:
                keep = k3
                new = u3
            state = tl.where(exists, state * keep[:, None] + new.to(tl.float32), state)
        u0 = v0
        u1 = v1
        u2 = v2
        u3 = v3
        k0 = l0
        k1 = l1
        k2 = l2
        k3 = l3
    tl.store(final + at, state, mask=inside)
