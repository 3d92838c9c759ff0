"""Gradients of the slot half: queries, what was written, states and gates, chunk by chunk.

Notation as in `output`: p are softmax weights, dp their gradients, dL = scale p (dp - delta) those
of q . SK_t. With A_tj = q_t . k'_j and B_tj = dout_t . v'_j both memories are read through the same
decays:

    q . SK_t[m]   = carry SK_0 . q  + sum_j decay_tj[m] s_j[m] A_tj
    dout . SV_t[m] = carry SV_0 . dout + sum_j decay_tj[m] s_j[m] B_tj

`readers` goes over the heads of a group and leaves, per head, the weights with which queries and
output gradients are summed into keys, values and states; `head_products` forms these sums, `gates`
what they say about gates; after the scan backwards over chunks `writers` adds what comes from later
chunks. (One kernel for readers and gates would keep more tiles than there are registers.)

Gate gradients are sums of what passes a gate, never differences of large sums, wherever gates are
strong (exact chunks, carried states); in the others reader sums minus writer sums are exact enough.
"""

import triton
import triton.language as tl

from pallas.triton.arithmetic import (
    LEAST_STRENGTH,
    LOG2E,
    collect,
    factor_tile,
    gates_of,
    level_pairs,
    narrowed,
    product,
    product_onto,
    right_slot,
    rows_of,
    rows_product,
    slice_of,
    spread,
    store_rows,
    summed,
    write_strength,
)


@triton.jit
def _read_head(
    keys,
    values,
    slot_keys,
    slot_values,
    value,
    slot_query,
    slot_key,
    before,
    factors,
    lse,
    delta,
    share_grad,
    out_grad,
    query_grad,
    key_tiles,
    value_tiles,
    full_delta,
    segment,
    is_token,
    leaves,
    readable,
    small_window,
    write_row,
    state,
    tile,
    row,
    inside,
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
    SLICE_V: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of `readers`."""
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    in_slots = m < M
    state_row = state * M + m
    if RESIDENT:
        q = slice_of(slot_query, row, is_token, 0, H, H, SLICE_H)
        products = product(q, tl.trans(keys), PRECISION)
        logits = product(q, tl.trans(slot_keys), PRECISION)
        dout = slice_of(out_grad, row, is_token, 0, V, V, SLICE_V)
        grad_products = product(dout, tl.trans(values), PRECISION)
        grads = product(dout, tl.trans(slot_values), PRECISION)
    else:
        products = rows_product(
            slot_query, row, is_token, slot_key, write_row, leaves, H, H, SLICE_H, PRECISION
        )
        logits = rows_product(
            slot_query, row, is_token, before, state_row, in_slots, H + V, H, SLICE_H, PRECISION
        )
        grad_products = rows_product(
            out_grad, row, is_token, value, write_row, leaves, V, V, SLICE_V, PRECISION
        )
        grads = rows_product(
            out_grad, row, is_token, before + H, state_row, in_slots, H + V, V, SLICE_V, PRECISION
        )
    pairs = (segment[:, None] == segment[None, :]) & (j[None, :] <= j[:, None])
    carry = factor_tile(factors, state, LEVELS + 2, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
    products = narrowed(tl.where(pairs, products, 0.0), PRECISION)
    logits = spread(
        products, factors, state, logits * carry, steps, EXACT, M, C, LEVELS, BLOCK_M, PRECISION
    )
    grad_products = narrowed(tl.where(pairs, grad_products, 0.0), PRECISION)
    grads = spread(
        grad_products, factors, state, grads * carry, steps, EXACT, M, C, LEVELS, BLOCK_M, PRECISION
    )
    log_sum = tl.load(lse + row, mask=inside, other=0.0)
    d = tl.load(delta + row, mask=inside, other=0.0)
    ds = tl.load(share_grad + row, mask=inside, other=0.0)
    weights = tl.exp2(tl.where(readable, logits * (SCALE * LOG2E) - log_sum[:, None], 0.0))
    weights = tl.where(readable, weights, 0.0)
    grads = grads + ds[:, None]
    # What `deltas` has left out beside a small window.
    d += tl.where(small_window, tl.sum(weights * grads, 1), 0.0)
    tl.store(full_delta + row, d, mask=inside)
    logit_grads = weights * (grads - d[:, None]) * SCALE

    tl.store(value_tiles + tile + C + m[None, :], narrowed(weights, PRECISION))
    mixed = collect(weights, factors, state, steps, EXACT, M, C, LEVELS, BLOCK_M, PRECISION)
    mixed = narrowed(tl.where(pairs, mixed, 0.0), PRECISION)
    tl.store(value_tiles + tile + j[None, :], mixed)
    tl.store(key_tiles + tile + C + m[None, :], narrowed(logit_grads, PRECISION))
    mixed = collect(logit_grads, factors, state, steps, EXACT, M, C, LEVELS, BLOCK_M, PRECISION)
    mixed = narrowed(tl.where(pairs, mixed, 0.0), PRECISION)
    tl.store(key_tiles + tile + j[None, :], mixed)
    logit_grads = narrowed(logit_grads * carry, PRECISION)
    if RESIDENT:
        dq = product(logit_grads, slot_keys, PRECISION)
        dq = product_onto(mixed, keys, dq, PRECISION)
        store_rows(query_grad, row, inside, dq, H, SLICE_H)
    else:
        for first in range(0, H, SLICE_H):
            some = slice_of(before, state_row, in_slots, first, H + V, H, SLICE_H)
            part = product(logit_grads, some, PRECISION)
            some = slice_of(slot_key, write_row, leaves, first, H, H, SLICE_H)
            part = product_onto(mixed, some, part, PRECISION)
            column = first + tl.arange(0, SLICE_H)
            at = query_grad + row[:, None] * H + column[None, :]
            mask = inside[:, None] & (column < H)[None, :]
            tl.store(at, part.to(query_grad.dtype.element_ty), mask=mask)


@triton.jit
def readers(
    value,
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
    full_delta,
    N: tl.constexpr,
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
    SINK: tl.constexpr,
    STAGES: tl.constexpr,
    SMALL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the slot queries of one chunk and group; tiles for the kernels that follow.

    Beside windows of at most SMALL rows `delta` lacks the slots' part; it is added here, from the
    very products that it is subtracted from, and `full_delta` holds the sum. `key_tiles`
    [C, C + BLOCK_M] of a head holds (dA | dL), `value_tiles` (weights of v'_j | p).
    Where a head's width fits SLICE the chunk's tiles stay in shared memory for all heads.

    Roofline (B=1, N=32, K=8, H=V=128, M=64, bf16, T=32768): reads queries and output gradients 537
    MB, keys, values, states, factors 335 MB, writes query gradients 268 MB and tiles 537 MB: 1.7
    GB, 0.40 ms at 4.2 TB/s; 2 T N (2 H M + V M + 2 C H + C V + 4 C M) = 138 GFLOP, 0.20 ms.
    """
    k = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = N // K
    RESIDENT: tl.constexpr = (SLICE_H >= H) and (SLICE_V >= V)
    w = tl.load(window)
    reads_slots = tl.load(window + 1)
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    is_token = n >= 0
    leaves = n >= w
    in_slots = m < M
    segment = tl.cumsum((n == 0).to(tl.int32), 0)
    readable = is_token & ((n >= w) | SINK) & (reads_slots != 0)
    readable = readable[:, None] & in_slots[None, :]
    write_row = (b * (T + P) + t + P - w) * K + k
    state = (b * chunks + chunk) * K + k
    state_row = state * M + m
    is_exact = tl.load(exact + state)
    if RESIDENT:
        keys = slice_of(slot_key, write_row, leaves, 0, H, H, SLICE_H)
        values = slice_of(value, write_row, leaves, 0, V, V, SLICE_V)
        slot_keys = slice_of(before, state_row, in_slots, 0, H + V, H, SLICE_H)
        slot_values = slice_of(before + H, state_row, in_slots, 0, H + V, V, SLICE_V)
    else:
        keys = 0
        values = 0
        slot_keys = 0
        slot_values = 0
    WIDTH: tl.constexpr = C + BLOCK_M
    if is_exact == 0:
        for head in tl.range(k * G, (k + 1) * G, num_stages=STAGES, disable_licm=True):
            row = (b * T + t) * N + head
            tile = ((b * chunks + chunk) * N + head) * C * WIDTH + j[:, None] * WIDTH
            _read_head(
                keys, values, slot_keys, slot_values, value, slot_query, slot_key, before, factors,
                lse, delta, share_grad, out_grad, query_grad, key_tiles, value_tiles, full_delta,
                segment, is_token, leaves, readable, w <= SMALL, write_row, state, tile, row, t < T,
                1, False, RESIDENT, H, V, M, C, LEVELS, BLOCK_M, SLICE_H, SLICE_V, SCALE, PRECISION,
            )  # fmt: skip
    else:
        for head in tl.range(k * G, (k + 1) * G, disable_licm=True):
            row = (b * T + t) * N + head
            tile = ((b * chunks + chunk) * N + head) * C * WIDTH + j[:, None] * WIDTH
            _read_head(
                keys, values, slot_keys, slot_values, value, slot_query, slot_key, before, factors,
                lse, delta, share_grad, out_grad, query_grad, key_tiles, value_tiles, full_delta,
                segment, is_token, leaves, readable, w <= SMALL, write_row, state, tile, row, t < T,
                LEVELS + is_exact, True, RESIDENT, H, V, M, C, LEVELS, BLOCK_M, SLICE_H, SLICE_V,
                SCALE, PRECISION,
            )  # fmt: skip


@triton.jit
def _gate_side(
    writer_sum,
    gate_sum,
    written_tile,
    state_tile,
    rows,
    written_rows,
    state_columns,
    factors,
    tiles,
    segment,
    is_token,
    leaves,
    write_row,
    state,
    tile,
    row,
    steps,
    EXACT: tl.constexpr,
    RESIDENT: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of `gates`, keys with queries or values with output gradients: the sums grown."""
    j = tl.arange(0, C)
    m = tl.arange(0, BLOCK_M)
    same = segment[:, None] == segment[None, :]
    grads = tl.load(tiles + tile + C + m[None, :])
    # The state before the chunk decays through all gates up to the reader.
    if RESIDENT:
        x = slice_of(rows, row, is_token, 0, WIDTH, WIDTH, SLICE)
        term = product(x, tl.trans(state_tile), PRECISION)
        products = product(x, tl.trans(written_tile), PRECISION)
    else:
        term = rows_product(
            rows, row, is_token, state_columns, state * M + m, m < M, STRIDE, WIDTH, SLICE,
            PRECISION,
        )  # fmt: skip
        products = rows_product(
            rows, row, is_token, written_rows, write_row, leaves, WIDTH, WIDTH, SLICE, PRECISION
        )
    term = term * factor_tile(factors, state, LEVELS + 2, j, M, C, LEVELS, BLOCK_M)
    term = term * grads.to(tl.float32)
    products = tl.where(same & (j[None, :] <= j[:, None]), products, 0.0)
    products = narrowed(products, PRECISION)
    if EXACT:
        gate_sum += product(same & (j[None, :] >= j[:, None]), term, PRECISION)
        for level in tl.range(0, steps, disable_licm=True):
            left = factor_tile(factors, state, level, j, M, C, LEVELS, BLOCK_M)
            slot = right_slot(level, LEVELS)
            right = factor_tile(factors, state, slot, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
            near = tl.where(level_pairs(level, C, LEVELS), products, 0.0)
            grads_right = narrowed(grads * right, PRECISION)
            written = product(tl.trans(near), grads_right, PRECISION) * left.to(tl.float32)
            writer_sum += written
            # A reader's factor holds the gates from the middle to it, a writer's those after it up
            # to the middle; at the last level there are none.
            written += product(near, left, PRECISION) * grads_right.to(tl.float32)
            half = C >> (level + 1)
            block = tl.maximum(2 * half, 1)
            is_right = j % block >= half
            passed = tl.where(is_right[:, None], j[None, :] >= j[:, None], j[None, :] < j[:, None])
            passed = passed & ((j // block)[:, None] == (j // block)[None, :])
            passed = passed & (is_right[:, None] == is_right[None, :]) & (level < LEVELS)
            gate_sum += product(passed, written, PRECISION)
    else:
        gate_sum += term
        left = factor_tile(factors, state, 0, j, M, C, LEVELS, BLOCK_M)
        right = factor_tile(factors, state, 1, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
        grads_right = narrowed(grads * right, PRECISION)
        gate_sum += product(products, left, PRECISION) * grads_right.to(tl.float32)
        written = product(tl.trans(products), grads_right, PRECISION)
        writer_sum += written * left.to(tl.float32)
    return writer_sum, gate_sum


@triton.jit
def gates(
    value,
    log_gate,
    slot_query,
    slot_key,
    number,
    window,
    before,
    factors,
    exact,
    out_grad,
    key_tiles,
    value_tiles,
    T,
    P,
    gate_grad,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE_H: tl.constexpr,
    SLICE_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The part of the gates' gradient that stays inside the chunk, summed over the group.

    A decay factor exp(G) has the gradient (its value times the gradient of what it multiplies) in
    G, which goes to all gates in the sum G: reader terms to the gates before the reader, writer
    terms to the gates after the writer, up to where the level's factors meet.

    Roofline (B=1, N=32, K=8, H=V=128, M=64, bf16, T=32768): reads queries, output gradients 537 MB,
    halves of the tiles 268 MB, keys, values, states, factors 335 MB, writes 67 MB: 1.2 GB, 0.29 ms
    at 4.2 TB/s; 2 T N (C + M) (H + V) + 8 T N C M = 103 GFLOP, 0.15 ms.
    """
    k = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = N // K
    w = tl.load(window)
    j = tl.arange(0, C)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    is_token = n >= 0
    leaves = n >= w
    segment = tl.cumsum((n == 0).to(tl.int32), 0)
    write_row = (b * (T + P) + t + P - w) * K + k
    state = (b * chunks + chunk) * K + k
    is_exact = tl.load(exact + state)
    RESIDENT: tl.constexpr = (SLICE_H >= H) and (SLICE_V >= V)
    keys = 0
    values = 0
    slot_keys = 0
    slot_values = 0
    if RESIDENT:
        m = tl.arange(0, BLOCK_M)
        keys = slice_of(slot_key, write_row, leaves, 0, H, H, SLICE_H)
        values = slice_of(value, write_row, leaves, 0, V, V, SLICE_V)
        slot_keys = slice_of(before, state * M + m, m < M, 0, H + V, H, SLICE_H)
        slot_values = slice_of(before + H, state * M + m, m < M, 0, H + V, V, SLICE_V)
    # Sums over the heads: of the terms of left factors, and of the gates' gradients (exact) or the
    # reader terms that they are sums of (else).
    writer_sum = tl.zeros([C, BLOCK_M], tl.float32)
    gate_sum = tl.zeros([C, BLOCK_M], tl.float32)
    WIDTH: tl.constexpr = C + BLOCK_M
    if is_exact == 0:
        for head in tl.range(k * G, (k + 1) * G, num_stages=STAGES, disable_licm=True):
            row = (b * T + t) * N + head
            tile = ((b * chunks + chunk) * N + head) * C * WIDTH + j[:, None] * WIDTH
            writer_sum, gate_sum = _gate_side(
                writer_sum, gate_sum, keys, slot_keys, slot_query, slot_key, before, factors,
                key_tiles, segment, is_token, leaves, write_row, state, tile, row, 1, False,
                RESIDENT, H + V, H, M, C, LEVELS, BLOCK_M, SLICE_H, PRECISION,
            )  # fmt: skip
            writer_sum, gate_sum = _gate_side(
                writer_sum, gate_sum, values, slot_values, out_grad, value, before + H, factors,
                value_tiles, segment, is_token, leaves, write_row, state, tile, row,
                1, False, RESIDENT, H + V, V, M, C, LEVELS, BLOCK_M, SLICE_V, PRECISION,
            )  # fmt: skip
    else:
        for head in tl.range(k * G, (k + 1) * G, disable_licm=True):
            row = (b * T + t) * N + head
            tile = ((b * chunks + chunk) * N + head) * C * WIDTH + j[:, None] * WIDTH
            writer_sum, gate_sum = _gate_side(
                writer_sum, gate_sum, keys, slot_keys, slot_query, slot_key, before, factors,
                key_tiles, segment, is_token, leaves, write_row, state, tile, row, LEVELS +
                is_exact, True, RESIDENT, H + V, H, M, C, LEVELS, BLOCK_M, SLICE_H, PRECISION,
            )  # fmt: skip
            writer_sum, gate_sum = _gate_side(
                writer_sum, gate_sum, values, slot_values, out_grad, value, before + H, factors,
                value_tiles, segment, is_token, leaves, write_row, state, tile, row,
                LEVELS + is_exact, True, RESIDENT, H + V, V, M, C, LEVELS, BLOCK_M, SLICE_V,
                PRECISION,
            )  # fmt: skip

    g = gates_of(log_gate, write_row, leaves, M, BLOCK_M)
    if is_exact == 0:
        later = (segment[:, None] == segment[None, :]) & (j[None, :] >= j[:, None])
        gate_sum = summed(later & (n != 0)[:, None], gate_sum - writer_sum)
    strength = tl.maximum(write_strength(g), LEAST_STRENGTH)
    result = gate_sum - tl.exp(g) * (writer_sum / strength)
    store_rows(gate_grad, (b * T + t) * K + k, t < T, result, M, BLOCK_M)


@triton.jit
def _tile_products(
    tiles,
    rows,
    factors,
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
    LEVELS: tl.constexpr,
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
    state_row = (b * chunks + chunk) * K + k
    carry = factor_tile(factors, state_row, LEVELS + 2, j, M, C, LEVELS, BLOCK_M).to(tl.float32)
    for first in range(0, BLOCK, SLICE):
        column = first + tl.arange(0, SLICE)
        in_width = (column < WIDTH)[None, :]
        written = tl.zeros([C, SLICE], tl.float32)
        state = tl.zeros([BLOCK_M, SLICE], tl.float32)
        for head in tl.range(k * G, (k + 1) * G, num_stages=STAGES, disable_licm=True):
            row = (b * T + t) * N + head
            x = tl.load(
                rows + row[:, None] * WIDTH + column[None, :],
                mask=inside[:, None] & in_width,
                other=0.0,
            )
            tile = tiles + ((b * chunks + chunk) * N + head) * C * TILE + j[:, None] * TILE
            written = product_onto(tl.trans(tl.load(tile + j[None, :])), x, written, PRECISION)
            to_state = narrowed(tl.load(tile + C + m[None, :]) * carry, PRECISION)
            state = product_onto(tl.trans(to_state), x, state, PRECISION)
        at = into + ((b * T + t) * K + k)[:, None] * WIDTH + column[None, :]
        tl.store(at, written.to(into.dtype.element_ty), mask=(t < T)[:, None] & in_width)
        at = onto + (state_row * M + m)[:, None] * STATE + OFFSET + column[None, :]
        tl.store(at, state.to(onto.dtype.element_ty), mask=(m < M)[:, None] & in_width)


@triton.jit
def head_products(
    slot_query,
    out_grad,
    number,
    key_tiles,
    value_tiles,
    factors,
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
    LEVELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a chunk's queries add to its slot keys, values and to the state before it.

    key part: tiles^T @ queries, value part: tiles^T @ output gradients, those for the state with
    the decay since the chunk's start, summed over the heads of the group in a fixed order, without
    atomics.

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
            key_tiles, slot_query, factors, inside, key_grad, state_grad, chunk, b, k, T,
            N, K, M, C, LEVELS, H, 0, H + V, BLOCK_H, BLOCK_M, min(SLICE, BLOCK_H), STAGES,
            PRECISION,
        )  # fmt: skip
    else:
        _tile_products(
            value_tiles, out_grad, factors, inside, value_grad, state_grad, chunk, b, k, T,
            N, K, M, C, LEVELS, V, H, H + V, BLOCK_V, BLOCK_M, min(SLICE, BLOCK_V), STAGES,
            PRECISION,
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
