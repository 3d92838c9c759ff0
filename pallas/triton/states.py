"""States at chunk starts: what each chunk writes, the scan over chunks, and the scan backwards.

The chunks' own contributions are independent of each other and computed at once; only the
first-order scan over them is sequential in time, and it is parallel over everything else.
"""

import triton
import triton.language as tl

from pallas.triton.arithmetic import (
    gates_of,
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
    left,
    right,
    middle,
    exact,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What one chunk adds to the slots of one kv head, and its decay factors.

    With w_j the gates from writer j to the chunk's end,

        written[m] = sum_j exp(w_j[m]) s_j[m] (slot_key_j, value_j),   kept[m] = exp(sum of gates),

    restricted to the segment that is open at the chunk's end. For chunks whose sums of gates stay
    above -LIMIT, `left` [C, M] and `right` [C, M] hold s_j exp(R - G_j) and exp(G_t - R) with R half
    the chunk's sum (`middle` = exp(R)); `exact` flags the others.

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

    factor_row = (b * T + t) * K + k
    running = summed(j[None, :] <= j[:, None], g)
    half = total * 0.5
    # Of no use in an exact chunk; the bound keeps infinities out of memory.
    to_middle = tl.exp(tl.minimum(half[None, :] - running, 80.0))
    store_rows(left, factor_row, t < T, strength * to_middle, M, BLOCK_M)
    from_middle = tl.exp(tl.minimum(running - half[None, :], 80.0))
    store_rows(right, factor_row, t < T, from_middle, M, BLOCK_M)
    tl.store(middle + state * M + m, tl.exp(half), mask=m < M)
    tl.store(exact + state, (tl.min(total, 0) < -LIMIT).to(tl.int32))

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
