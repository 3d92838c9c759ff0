"""The output: one softmax over the slots and the window, a chunk of tokens and a head at a time."""

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
    PRECISION: tl.constexpr,
):
    """Outputs of C tokens for HEADS heads of one group, rows (head, token).

    Slot logits are scale * (carry_t SK . q_t + sum_j decay_tj s_j (q_t . k'_j)), window logits
    scale * q_t . k_r over rows r of the window, walked through in blocks with a running maximum and
    sum. `lse` is the base-2 log-sum-exp of all of them, `share` the mass on the slots.

    Roofline (B=1, N=32, K=8, H=V=128, M=W=64, bf16, T=32768): reads both queries 537 MB, keys,
    slot keys, values 201 MB, states 134 MB, factors 67 MB, writes 268 MB: 1.21 GB, 0.29 ms at
    4.2 TB/s; 2 T N (2 H M + 2 V M + 2 C (H + V) + 4 C M) = 172 GFLOP, 0.25 ms at 700 TFLOP/s.
    """
    # Values wider than a slice are several programs, each with a softmax of its own.
    PARTS: tl.constexpr = (V + SLICE_V - 1) // SLICE_V
    head = tl.program_id(0) // PARTS * HEADS
    first_value = tl.program_id(0) % PARTS * SLICE_V
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    k = head // (N // K)
    w = tl.load(window)
    reads_slots = tl.load(window + 1)
    r = tl.arange(0, HEADS * C)
    place = r % C
    t = chunk * C + place
    j = tl.arange(0, C)
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    is_token = n >= 0
    query_row = (b * T + t) * N + head + r // C

    top = tl.full([HEADS * C], EMPTY, tl.float32)
    total = tl.zeros([HEADS * C], tl.float32)
    slot_total = tl.zeros([HEADS * C], tl.float32)
    acc = tl.zeros([HEADS * C, SLICE_V], tl.float32)
    if SLOTS:
        nj = tl.load(number + b * T + chunk * C + j, mask=chunk * C + j < T, other=-1)
        leaves = nj >= w
        segment_j = tl.cumsum((nj == 0).to(tl.int32), 0)
        # The segment of a row: how many restarts stand at or before its token.
        restarts = (nj == 0)[None, :] & (j[None, :] <= place[:, None])
        segment_t = tl.sum(restarts.to(tl.int32), 1)
        write_row = (b * (T + P) + chunk * C + j + P - w) * K + k
        pairs = (segment_t[:, None] == segment_j[None, :]) & (j[None, :] <= place[:, None])

        state = (b * tl.num_programs(1) + chunk) * K + k
        m = tl.arange(0, BLOCK_M)
        in_slots = m < M
        state_row = state * M + m
        products = rows_product(
            slot_query, query_row, is_token, slot_key, write_row, leaves, H, H, SLICE_H, PRECISION
        )
        products = narrowed(tl.where(pairs, products, 0.0), PRECISION)
        carried = rows_product(
            slot_query, query_row, is_token, before, state_row, in_slots, H + V, H, SLICE_H,
            PRECISION,
        )  # fmt: skip
        is_exact = tl.load(exact + state)
        carry = factor_tile(factors, state, LEVELS + 2, place, M, C, LEVELS, BLOCK_M)
        logits = carried * carry.to(tl.float32)
        logits = spread(
            products, factors, state, place, is_exact, logits, M, C, LEVELS, BLOCK_M, PRECISION
        )
        readable = is_token & ((n >= w) | SINK) & (reads_slots != 0)
        readable = readable[:, None] & in_slots[None, :]
        logits = tl.where(readable, logits * (SCALE * LOG2E), EMPTY)
        top = tl.max(logits, 1)
        weights = tl.where(readable, tl.exp2(logits - top[:, None]), 0.0)
        total = tl.sum(weights, 1)
        slot_total = total
        mixed = collect(weights, factors, state, place, is_exact, M, C, LEVELS, BLOCK_M, PRECISION)
        mixed = tl.where(pairs, mixed, 0.0)
        slot_values = slice_of(before + H, state_row, in_slots, first_value, H + V, V, SLICE_V)
        acc = product(weights * carry.to(tl.float32), slot_values, PRECISION)
        values = slice_of(value, write_row, leaves, first_value, V, V, SLICE_V)
        acc = product_onto(mixed, values, acc, PRECISION)

    reach = tl.minimum(n, w - 1)
    sees = is_token & (reach >= 0)
    first = t + P - reach
    lowest = tl.min(tl.where(sees, first, T + P), 0)
    end = tl.max(tl.where(sees, t + P + 1, 0), 0)
    if lowest < end:
        if SLICE_H >= H:
            q = rows_of(query, query_row, is_token, H, SLICE_H)
        for start in range(lowest, end, C):
            key_row = start + j
            inside = key_row < end
            at_row = (b * (T + P) + key_row) * K + k
            if SLICE_H >= H:
                window_keys = rows_of(key, at_row, inside, H, SLICE_H)
                scores = product(q, tl.trans(window_keys), PRECISION)
            else:
                scores = rows_product(
                    query, query_row, is_token, key, at_row, inside, H, H, SLICE_H, PRECISION
                )
            scores = scores * (SCALE * LOG2E)
            visible = (key_row[None, :] >= first[:, None]) & (key_row[None, :] <= (t + P)[:, None])
            visible = visible & sees[:, None]
            scores = tl.where(visible, scores, EMPTY)
            new_top = tl.maximum(top, tl.max(scores, 1))
            seen = tl.where(visible, tl.exp2(scores - new_top[:, None]), 0.0)
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(seen, 1)
            slot_total = slot_total * rescale
            window_values = slice_of(value, at_row, inside, first_value, V, V, SLICE_V)
            acc = product_onto(seen, window_values, acc * rescale[:, None], PRECISION)
            top = new_top

    safe = tl.where(total > 0, total, 1.0)
    column = first_value + tl.arange(0, SLICE_V)
    at = out + query_row[:, None] * V + column[None, :]
    mask = (t < T)[:, None] & (column < V)[None, :]
    tl.store(at, (acc / safe[:, None]).to(out.dtype.element_ty), mask=mask)
    if first_value == 0:
        tl.store(lse + query_row, top + tl.log2(safe), mask=t < T)
        tl.store(share + query_row, slot_total / safe, mask=t < T)
