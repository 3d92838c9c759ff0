"""The output: one softmax over slots and window, a chunk of tokens and a group at a time."""

import triton
import triton.language as tl

from pallas.triton.arithmetic import (
    EMPTY,
    LOG2E,
    collect,
    factor_tile,
    narrowed,
    product,
    product_onto,
    rows_of,
    rows_product,
    slice_of,
    spread,
)


@triton.jit
def _slot_logits(
    slot_query,
    slot_key,
    keys,
    slot_keys,
    before,
    factors,
    segment,
    is_token,
    leaves,
    readable,
    write_row,
    state,
    row,
    steps,
    EXACT: tl.constexpr,
    RESIDENT: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE_H: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Base-2 logits of the slots, EMPTY where they are not read."""
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    if RESIDENT:
        q = rows_of(slot_query, row, is_token, H, SLICE_H)
        products = product(q, tl.trans(keys), PRECISION)
        logits = product(q, tl.trans(slot_keys), PRECISION)
    else:
        products = rows_product(
            slot_query, row, is_token, slot_key, write_row, leaves, H, H, SLICE_H, PRECISION
        )
        logits = rows_product(
            slot_query, row, is_token, before, state * M + m, m < M, H + V, H, SLICE_H, PRECISION
        )
    pairs = (segment[:, None] == segment[None, :]) & (j[None, :] <= j[:, None])
    products = narrowed(tl.where(pairs, products, 0.0), PRECISION)
    carry = factor_tile(factors, state, LEVELS + 2, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
    logits = spread(
        products, factors, state, logits * carry, steps, EXACT, M, C, LEVELS, BLOCK_M, PRECISION
    )
    return tl.where(readable, logits * (SCALE * LOG2E), EMPTY)


@triton.jit
def _head(
    keys,
    slot_keys,
    values,
    slot_values,
    near_keys,
    last_keys,
    near_values,
    last_values,
    query,
    key,
    value,
    slot_query,
    slot_key,
    before,
    factors,
    out,
    lse,
    share,
    segment,
    n,
    leaves,
    readable,
    w,
    T,
    P,
    t,
    first_value,
    write_row,
    near_row,
    state,
    row,
    steps,
    EXACT: tl.constexpr,
    RESIDENT: tl.constexpr,
    SHORT: tl.constexpr,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE_H: tl.constexpr,
    SLICE_V: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of `output`."""
    j = tl.arange(0, C)
    is_token = n >= 0
    reach = tl.minimum(n, w - 1)
    sees = is_token & (reach >= 0)
    top = tl.full([C], EMPTY, tl.float32)
    if SLOTS:
        logits = _slot_logits(
            slot_query, slot_key, keys, slot_keys, before, factors, segment, is_token, leaves,
            readable, write_row, state, row, steps, EXACT, RESIDENT, H, V, M, C, LEVELS, BLOCK_M,
            SLICE_H, SCALE, PRECISION,
        )  # fmt: skip
        top = tl.max(logits, 1)
    if SHORT:
        # Two blocks of keys, C rows that end with the token's chunk each: the one before is seen
        # by writers after the reader only, the own one up to it, so one tile holds both.
        q = rows_of(query, row, is_token, H, SLICE_H)
        own = j[None, :] <= j[:, None]
        scores = product(q, tl.trans(last_keys), PRECISION)
        scores = tl.where(own, scores, product(q, tl.trans(near_keys), PRECISION))
        back = j[:, None] - j[None, :]
        back = tl.where(own, back, back + C)
        visible = (back <= reach[:, None]) & sees[:, None]
        scores = tl.where(visible, scores * (SCALE * LOG2E), EMPTY)
        top = tl.maximum(top, tl.max(scores, 1))
    total = tl.zeros([C], tl.float32)
    slot_total = tl.zeros([C], tl.float32)
    acc = tl.zeros([C, SLICE_V], tl.float32)
    if SLOTS:
        weights = tl.where(readable, tl.exp2(logits - top[:, None]), 0.0)
        slot_total = tl.sum(weights, 1)
        total = slot_total
        mixed = collect(weights, factors, state, steps, EXACT, M, C, LEVELS, BLOCK_M, PRECISION)
        pairs = (segment[:, None] == segment[None, :]) & (j[None, :] <= j[:, None])
        mixed = tl.where(pairs, mixed, 0.0)
        carry = factor_tile(factors, state, LEVELS + 2, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
        if not RESIDENT:
            m = tl.arange(0, BLOCK_M)
            slot_values = slice_of(before + H, state * M + m, m < M, first_value, H + V, V, SLICE_V)
            values = slice_of(value, write_row, leaves, first_value, V, V, SLICE_V)
        acc = product(weights * carry, slot_values, PRECISION)
        acc = product_onto(mixed, values, acc, PRECISION)
    if SHORT:
        seen = tl.where(visible, tl.exp2(scores - top[:, None]), 0.0)
        total += tl.sum(seen, 1)
        acc = product_onto(tl.where(own, 0.0, seen), near_values, acc, PRECISION)
        acc = product_onto(tl.where(own, seen, 0.0), last_values, acc, PRECISION)
    else:
        first = t + P - reach
        lowest = tl.min(tl.where(sees, first, T + P), 0)
        end = tl.max(tl.where(sees, t + P + 1, 0), 0)
        for start in range(lowest, end, C):
            key_row = start + j
            inside = key_row < end
            at_row = near_row + key_row.to(tl.int64) * K
            scores = rows_product(
                query, row, is_token, key, at_row, inside, H, H, SLICE_H, PRECISION
            )
            visible = (key_row[None, :] >= first[:, None]) & (key_row[None, :] <= (t + P)[:, None])
            visible = visible & sees[:, None]
            scores = tl.where(visible, scores * (SCALE * LOG2E), EMPTY)
            new_top = tl.maximum(top, tl.max(scores, 1))
            seen = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(seen, 1)
            slot_total = slot_total * rescale
            some = slice_of(value, at_row, inside, first_value, V, V, SLICE_V)
            acc = product_onto(seen, some, acc * rescale[:, None], PRECISION)
            top = new_top
    safe = tl.where(total > 0, total, 1.0)
    column = first_value + tl.arange(0, SLICE_V)
    mask = (t < T)[:, None]
    if V % SLICE_V != 0:
        mask = mask & (column < V)[None, :]
    at = out + row[:, None] * V + column[None, :]
    tl.store(at, (acc / safe[:, None]).to(out.dtype.element_ty), mask=mask)
    if first_value == 0:
        tl.store(lse + row, top + tl.log2(safe), mask=t < T)
        tl.store(share + row, slot_total / safe, mask=t < T)


@triton.jit
def output(
    query,
    key,
    value,
    log_gate,
    slot_query,
    slot_key,
    number,
    window,
    before,
    factors,
    exact,
    T,
    P,
    out,
    lse,
    share,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE_H: tl.constexpr,
    SLICE_V: tl.constexpr,
    SCALE: tl.constexpr,
    SINK: tl.constexpr,
    SLOTS: tl.constexpr,
    SHORT: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of C tokens for HEADS heads of one group, one head after another.

    Slot logits are scale * (carry_t SK . q_t + sum_j decay_tj s_j (q_t . k'_j)), window logits
    scale * q_t . k_r over rows r of the window: for a window that is known to be SHORT, of at most
    C rows, all at once; else in blocks with a running maximum and sum. `lse` is the base-2
    log-sum-exp of all of them, `share` the mass on the slots. Where a head fits SLICE columns, the
    chunk's keys, values and state stay in shared memory for all heads and the next head's queries
    are loaded ahead; SHARED says that the window is C rows, whose values are those that the slots
    take.

    Roofline (B=1, N=32, K=8, H=V=128, M=W=64, bf16, T=32768): reads both queries 537 MB, keys,
    slot keys, values 201 MB, states 134 MB, factors 67 MB, writes 268 MB: 1.21 GB, 0.29 ms at
    4.2 TB/s; 2 T N (2 H M + 2 V M + 2 C (H + V) + 4 C M) = 172 GFLOP, 0.25 ms at 700 TFLOP/s.
    """
    # Values wider than a slice are several programs, each with a softmax of its own.
    PARTS: tl.constexpr = (V + SLICE_V - 1) // SLICE_V
    RESIDENT: tl.constexpr = (SLICE_H >= H) and (PARTS == 1)
    first_head = tl.program_id(0) // PARTS * HEADS
    first_value = tl.program_id(0) % PARTS * SLICE_V
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    k = first_head // (N // K)
    w = tl.load(window)
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    leaves = n >= w
    segment = tl.cumsum((n == 0).to(tl.int32), 0)
    readable = (n >= 0) & ((n >= w) | SINK) & (tl.load(window + 1) != 0)
    readable = readable[:, None] & (m < M)[None, :]
    write_row = (b * (T + P) + t + P - w) * K + k
    state = (b * tl.num_programs(1) + chunk) * K + k
    near_row = b * (T + P) * K + k
    keys = 0
    slot_keys = 0
    values = 0
    slot_values = 0
    near_keys = 0
    last_keys = 0
    near_values = 0
    last_values = 0
    if SHORT:
        last = near_row + (t + P).to(tl.int64) * K
        in_last = t < T
        in_near = t + P >= C
        last_keys = rows_of(key, last, in_last, H, SLICE_H)
        near_keys = rows_of(key, last - C * K, in_near & (t - C < T), H, SLICE_H)
        last_values = rows_of(value, last, in_last, V, SLICE_V)
        near_values = rows_of(value, last - C * K, in_near & (t - C < T), V, SLICE_V)
    if SLOTS and RESIDENT:
        keys = rows_of(slot_key, write_row, leaves, H, SLICE_H)
        slot_keys = slice_of(before, state * M + m, m < M, 0, H + V, H, SLICE_H)
        slot_values = slice_of(before + H, state * M + m, m < M, 0, H + V, V, SLICE_V)
        if SHARED:
            values = near_values
        else:
            values = rows_of(value, write_row, leaves, V, SLICE_V)
    is_exact = 0
    if SLOTS:
        is_exact = tl.load(exact + state)
    if is_exact == 0:
        for index in tl.range(0, HEADS, num_stages=STAGES, disable_licm=True):
            row = (b * T + t) * N + first_head + index
            _head(
                keys, slot_keys, values, slot_values, near_keys, last_keys, near_values,
                last_values, query, key, value, slot_query, slot_key, before, factors, out, lse,
                share, segment, n, leaves, readable, w, T, P, t, first_value, write_row, near_row,
                state, row, 1, False, RESIDENT, SHORT, SLOTS, K, H, V, M, C, LEVELS, BLOCK_M,
                SLICE_H, SLICE_V, SCALE, PRECISION,
            )  # fmt: skip
    else:
        for index in tl.range(0, HEADS, disable_licm=True):
            row = (b * T + t) * N + first_head + index
            _head(
                keys, slot_keys, values, slot_values, near_keys, last_keys, near_values,
                last_values, query, key, value, slot_query, slot_key, before, factors, out, lse,
                share, segment, n, leaves, readable, w, T, P, t, first_value, write_row, near_row,
                state, row, LEVELS + is_exact, True, RESIDENT, SHORT, SLOTS, K, H, V, M, C, LEVELS,
                BLOCK_M, SLICE_H, SLICE_V, SCALE, PRECISION,
            )  # fmt: skip
