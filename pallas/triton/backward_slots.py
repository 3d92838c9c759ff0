"""Gradients of the slot half: queries, what was written, states and gates, chunk by chunk.

Notation as in `output`: p are softmax weights, dp their gradients, dL = scale p (dp - delta) those of
q . SK_t. With A_tj = q_t . k'_j and B_tj = dout_t . v'_j both memories are read through the same decays:

    q . SK_t[m]   = carry SK_0 . q  + sum_j decay_tj[m] s_j[m] A_tj
    dout . SV_t[m] = carry SV_0 . dout + sum_j decay_tj[m] s_j[m] B_tj

`readers` goes over the heads of a group and leaves, per head, the weights with which queries and output
gradients are summed into keys, values and states; `head_products` forms these sums; after the scan
backwards over chunks `writers` adds what comes from later chunks.

Gate gradients are sums of what passes a gate, never differences of large sums, wherever gates are
strong (exact chunks, carried states); in the others reader sums minus writer sums are exact enough.
"""

import triton
import triton.language as tl

from pallas.triton.arithmetic import (
    LEAST_STRENGTH,
    LOG2E,
    factor_tile,
    gates_of,
    left_slot,
    level_half,
    level_pairs,
    narrowed,
    product,
    product_onto,
    right_slot,
    rows_of,
    spread,
    store_rows,
    summed,
    write_strength,
)


@triton.jit
def readers(
    value,
    log_gate,
    slot_query,
    slot_key,
    number,
    window,
    before,
    factors,
    exact,
    lse,
    delta,
    share_grad,
    out_grad,
    T,
    P,
    query_grad,
    key_tiles,
    value_tiles,
    gate_grad,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCALE: tl.constexpr,
    SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the slot queries of one chunk and group; tiles for `head_products`.

    `key_tiles` [C, C + BLOCK_M] of a head holds (dA | dL carry), `value_tiles` (weights of v'_j |
    p carry). `gate_grad` gets the part of the gates' gradient that stays inside the chunk.

    Roofline (B=1, N=32, K=8, H=V=128, M=64, bf16, T=32768): reads queries and output gradients 537 MB,
    keys, values, states, factors 335 MB, writes query gradients 268 MB and tiles 537 MB: 1.7 GB,
    0.40 ms at 4.2 TB/s; 2 T N (3 H M + 2 V M + 3 C H + C V + 6 C M) = 165 GFLOP, 0.24 ms.
    """
    k = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = N // K
    w = tl.load(window)
    reads_slots = tl.load(window + 1)
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    leaves = n >= w
    segment = tl.cumsum((n == 0).to(tl.int32), 0)
    same = segment[:, None] == segment[None, :]
    pairs = same & (j[None, :] <= j[:, None])
    readable = (n >= 0) & ((n >= w) | SINK) & (reads_slots != 0)
    readable = readable[:, None] & (m < M)[None, :]

    write_row = (b * (T + P) + t + P - w) * K + k
    state = (b * chunks + chunk) * K + k
    keys = rows_of(slot_key, write_row, leaves, H, BLOCK_H)
    values = rows_of(value, write_row, leaves, V, BLOCK_V)
    column_h = tl.arange(0, BLOCK_H)
    column_v = tl.arange(0, BLOCK_V)
    at = before + (state * M + m)[:, None] * (H + V)
    mask_h = (m < M)[:, None] & (column_h < H)[None, :]
    mask_v = (m < M)[:, None] & (column_v < V)[None, :]
    slot_keys = tl.load(at + column_h[None, :], mask=mask_h, other=0.0)
    slot_values = tl.load(at + H + column_v[None, :], mask=mask_v, other=0.0)
    is_exact = tl.load(exact + state)
    carry = factor_tile(factors, state, LEVELS + 2, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
    later = same & (j[None, :] >= j[:, None]) & (n != 0)[:, None]

    # Sums over the heads: of the terms of left factors, and of the gates' gradients (exact) or what
    # they are sums of (else).
    writer_sum = tl.zeros([C, BLOCK_M], tl.float32)
    gate_sum = tl.zeros([C, BLOCK_M], tl.float32)
    for head in range(k * G, (k + 1) * G):
        row = (b * T + t) * N + head
        q = rows_of(slot_query, row, n >= 0, H, BLOCK_H)
        products = tl.where(pairs, product(q, tl.trans(keys), PRECISION), 0.0)
        carried = product(q, tl.trans(slot_keys), PRECISION) * carry
        logits = spread(
            products, factors, state, j, is_exact, carried, M, C, LEVELS, BLOCK_M, PRECISION
        )
        dout = rows_of(out_grad, row, n >= 0, V, BLOCK_V)
        grad_products = tl.where(pairs, product(dout, tl.trans(values), PRECISION), 0.0)
        grad_carried = product(dout, tl.trans(slot_values), PRECISION) * carry
        grads = spread(
            grad_products, factors, state, j, is_exact, grad_carried, M, C, LEVELS, BLOCK_M,
            PRECISION,
        )  # fmt: skip
        log_sum = tl.load(lse + row, mask=t < T, other=0.0)
        d = tl.load(delta + row, mask=t < T, other=0.0)
        ds = tl.load(share_grad + row, mask=t < T, other=0.0)
        weights = tl.exp2(tl.where(readable, logits * (SCALE * LOG2E) - log_sum[:, None], 0.0))
        weights = tl.where(readable, weights, 0.0)
        logit_grads = weights * (grads + (ds - d)[:, None]) * SCALE
        reader_term = logit_grads * logits + weights * grads
        if is_exact != 0:
            carry_term = logit_grads * carried + weights * grad_carried
            gate_sum += product(later, carry_term, PRECISION)
        else:
            gate_sum += reader_term

        mixed = tl.zeros([C, C], tl.float32)
        product_grads = tl.zeros([C, C], tl.float32)
        for level in range(tl.where(is_exact != 0, LEVELS + 1, 1)):
            slot = left_slot(level, is_exact)
            left = factor_tile(factors, state, slot, j, M, C, LEVELS, BLOCK_M)
            slot = right_slot(level, is_exact, LEVELS)
            right = factor_tile(factors, state, slot, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
            near = level_pairs(j, j, level, is_exact, C, LEVELS)
            weights_right = narrowed(weights * right, PRECISION)
            grads_right = narrowed(logit_grads * right, PRECISION)
            across = product(weights_right, tl.trans(left), PRECISION)
            mixed += tl.where(near, across, 0.0)
            across = product(grads_right, tl.trans(left), PRECISION)
            product_grads += tl.where(near, across, 0.0)
            near_products = narrowed(tl.where(near, products, 0.0), PRECISION)
            near_grads = narrowed(tl.where(near, grad_products, 0.0), PRECISION)
            writer_term = product(tl.trans(near_products), grads_right, PRECISION)
            writer_term = product_onto(tl.trans(near_grads), weights_right, writer_term, PRECISION)
            writer_term = writer_term * left.to(tl.float32)
            writer_sum += writer_term
            if is_exact != 0:
                # A reader's factor holds the gates from the middle to it, a writer's those after it
                # up to the middle; at the last level there are none.
                term = grads_right.to(tl.float32) * product(near_products, left, PRECISION)
                term += weights_right.to(tl.float32) * product(near_grads, left, PRECISION)
                half = level_half(level, is_exact, C)
                block = tl.maximum(2 * half, 1)
                is_right = j % block >= half
                one_block = (j // block)[:, None] == (j // block)[None, :]
                passed = tl.where(is_right[:, None], j[None, :] >= j[:, None], j[None, :] < j[:, None])
                passed = passed & one_block & (is_right[:, None] == is_right[None, :])
                passed = passed & (level < LEVELS)
                gate_sum += product(passed, term + writer_term, PRECISION)
        dq = product(logit_grads * carry, slot_keys, PRECISION)
        product_grads = narrowed(tl.where(pairs, product_grads, 0.0), PRECISION)
        dq = product_onto(product_grads, keys, dq, PRECISION)
        store_rows(query_grad, row, t < T, dq, H, BLOCK_H)
        WIDTH: tl.constexpr = C + BLOCK_M
        tile = ((b * chunks + chunk) * N + head) * C * WIDTH + j[:, None] * WIDTH
        kind = key_tiles.dtype.element_ty
        tl.store(key_tiles + tile + j[None, :], product_grads)
        tl.store(key_tiles + tile + C + m[None, :], (logit_grads * carry).to(kind))
        tl.store(value_tiles + tile + j[None, :], tl.where(pairs, mixed, 0.0).to(kind))
        tl.store(value_tiles + tile + C + m[None, :], (weights * carry).to(kind))

    g = gates_of(log_gate, write_row, leaves, M, BLOCK_M)
    if is_exact == 0:
        gate_sum = summed(later, gate_sum - writer_sum)
    strength = tl.maximum(write_strength(g), LEAST_STRENGTH)
    result = gate_sum - tl.exp(g) * (writer_sum / strength)
    store_rows(gate_grad, (b * T + t) * K + k, t < T, result, M, BLOCK_M)


@triton.jit
def _tile_products(
    tiles,
    rows,
    inside,
    into,
    onto,
    chunk,
    b,
    k,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sums of tile^T @ rows over the heads of a group, SLICE columns at a time."""
    G: tl.constexpr = N // K
    TILE: tl.constexpr = C + BLOCK_M
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    t = chunk * C + j
    chunks = tl.num_programs(1)
    for first in range(0, BLOCK, SLICE):
        column = first + tl.arange(0, SLICE)
        in_width = (column < WIDTH)[None, :]
        written = tl.zeros([C, SLICE], tl.float32)
        state = tl.zeros([BLOCK_M, SLICE], tl.float32)
        for head in tl.range(k * G, (k + 1) * G, num_stages=STAGES):
            row = (b * T + t) * N + head
            x = tl.load(
                rows + row[:, None] * WIDTH + column[None, :],
                mask=inside[:, None] & in_width,
                other=0.0,
            )
            tile = tiles + ((b * chunks + chunk) * N + head) * C * TILE + j[:, None] * TILE
            written = product_onto(tl.trans(tl.load(tile + j[None, :])), x, written, PRECISION)
            to_state = tl.trans(tl.load(tile + C + m[None, :]))
            state = product_onto(to_state, x, state, PRECISION)
        at = into + ((b * T + t) * K + k)[:, None] * WIDTH + column[None, :]
        tl.store(at, written.to(into.dtype.element_ty), mask=(t < T)[:, None] & in_width)
        state_row = ((b * chunks + chunk) * K + k) * M + m
        at = onto + state_row[:, None] * STATE + OFFSET + column[None, :]
        tl.store(at, state.to(onto.dtype.element_ty), mask=(m < M)[:, None] & in_width)


@triton.jit
def head_products(
    slot_query,
    out_grad,
    number,
    key_tiles,
    value_tiles,
    T,
    key_grad,
    value_grad,
    state_grad,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a chunk's queries add to its slot keys, values and to the state before it.

    key part: tiles^T @ queries, value part: tiles^T @ output gradients, summed over the heads of the
    group in a fixed order, without atomics.

    Roofline (B=1, N=32, K=8, H=V=128, M=64, bf16, T=32768): reads tiles and rows 1.07 GB, writes
    0.27 GB: 0.32 ms at 4.2 TB/s; 2 T N (C + M) (H + V) = 69 GFLOP, 0.10 ms.
    """
    k = tl.program_id(0) // 2
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    t = chunk * C + tl.arange(0, C)
    inside = tl.load(number + b * T + t, mask=t < T, other=-1) >= 0
    if tl.program_id(0) % 2 == 0:
        _tile_products(
            key_tiles, slot_query, inside, key_grad, state_grad, chunk, b, k, T,
            N, K, M, C, H, 0, H + V, BLOCK_H, BLOCK_M, min(SLICE, BLOCK_H), STAGES, PRECISION,
        )  # fmt: skip
    else:
        _tile_products(
            value_tiles, out_grad, inside, value_grad, state_grad, chunk, b, k, T,
            N, K, M, C, V, H, H + V, BLOCK_V, BLOCK_M, min(SLICE, BLOCK_V), STAGES, PRECISION,
        )  # fmt: skip


@triton.jit
def writers(
    slot_key,
    value,
    log_gate,
    number,
    window,
    before,
    kept,
    after_grad,
    key_grad_inside,
    value_grad_inside,
    gate_grad_inside,
    T,
    P,
    key_grad,
    value_grad,
    gate_grad,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of what a chunk writes, with what later chunks ask of it.

    With L the gradient of the state after the chunk and w_j the decay from writer j to its end,

        d slot_key_j += sum_m w_j[m] s_j[m] LK[m],   d value_j likewise,
        d g_i += sum_{j<i} w_j s_j (LK . slot_key_j + LV . value_j) + kept (L . state before),
        d s_j += w_j (LK . slot_key_j + LV . value_j),   d g_j -= exp(g_j) d s_j.

    Roofline (K=8, H=V=128, M=64, bf16, T=32768): reads 0.80 GB, writes 0.2 GB: 0.24 ms at 4.2 TB/s;
    4 M (H + V) T K = 17 GFLOP, 0.02 ms.
    """
    k = tl.program_id(0)
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    w = tl.load(window)
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    leaves = n >= w
    write_row = (b * (T + P) + t + P - w) * K + k
    row = (b * T + t) * K + k
    g = gates_of(log_gate, write_row, leaves, M, BLOCK_M)
    restart = (n == 0).to(tl.int32)
    segment = tl.cumsum(restart, 0)
    survives = segment == tl.sum(restart, 0)
    factor = tl.exp(summed(j[None, :] > j[:, None], g)) * survives.to(tl.float32)[:, None]
    strength = tl.where(leaves[:, None], write_strength(g), 0.0)
    weight = factor * strength
    state_row = ((b * tl.num_programs(1) + chunk) * K + k) * M + m

    asked = tl.zeros([C, BLOCK_M], tl.float32)
    carried = tl.zeros([BLOCK_M], tl.float32)
    WIDTH: tl.constexpr = H + V
    for first in range(0, H, SLICE):
        column = first + tl.arange(0, SLICE)
        mask = leaves[:, None] & (column < H)[None, :]
        mask_state = (m < M)[:, None] & (column < H)[None, :]
        at = state_row[:, None] * WIDTH + column[None, :]
        later = tl.load(after_grad + at, mask=mask_state, other=0.0)
        earlier = tl.load(before + at, mask=mask_state, other=0.0)
        carried += tl.sum(later.to(tl.float32) * earlier.to(tl.float32), 1)
        x = tl.load(slot_key + write_row[:, None] * H + column[None, :], mask=mask, other=0.0)
        asked = product_onto(x, tl.trans(later), asked, PRECISION)
        at = row[:, None] * H + column[None, :]
        inside = tl.load(key_grad_inside + at, mask=mask, other=0.0).to(tl.float32)
        total = product_onto(weight, later, inside, PRECISION)
        mask = (t < T)[:, None] & (column < H)[None, :]
        tl.store(key_grad + at, total.to(key_grad.dtype.element_ty), mask=mask)
    for first in range(0, V, SLICE):
        column = first + tl.arange(0, SLICE)
        mask = leaves[:, None] & (column < V)[None, :]
        mask_state = (m < M)[:, None] & (column < V)[None, :]
        at = state_row[:, None] * WIDTH + H + column[None, :]
        later = tl.load(after_grad + at, mask=mask_state, other=0.0)
        earlier = tl.load(before + at, mask=mask_state, other=0.0)
        carried += tl.sum(later.to(tl.float32) * earlier.to(tl.float32), 1)
        x = tl.load(value + write_row[:, None] * V + column[None, :], mask=mask, other=0.0)
        asked = product_onto(x, tl.trans(later), asked, PRECISION)
        at = row[:, None] * V + column[None, :]
        inside = tl.load(value_grad_inside + at, mask=mask, other=0.0).to(tl.float32)
        total = product_onto(weight, later, inside, PRECISION)
        mask = (t < T)[:, None] & (column < V)[None, :]
        tl.store(value_grad + at, total.to(value_grad.dtype.element_ty), mask=mask)

    keep = tl.load(kept + state_row, mask=m < M, other=0.0)
    result = rows_of(gate_grad_inside, row, leaves, M, BLOCK_M)
    same = segment[:, None] == segment[None, :]
    result += summed(same & (j[None, :] < j[:, None]), weight * asked)
    result += (keep * carried)[None, :] - tl.exp(g) * factor * asked
    result = tl.where(leaves[:, None], result, 0.0)
    store_rows(gate_grad, row, t < T, result, M, BLOCK_M)
