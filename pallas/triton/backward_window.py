"""Gradients of the window half: queries by rows, keys and values by columns.

With p the weights in the joint softmax, p = exp(logit - lse), and delta_t = dout_t . out_t +
dshare_t share_t, the logits' gradients are p (dout_t . v_r - delta_t); both kernels form them anew.
"""

import triton
import triton.language as tl

from pallas.triton.arithmetic import LOG2E, product, product_onto, rows_of, store_rows


@triton.jit
def deltas(
    query,
    key,
    value,
    number,
    window,
    lse,
    out,
    share,
    out_grad,
    share_grad,
    T,
    P,
    delta,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    SMALL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """delta_t = dout_t . out_t + dshare_t share_t, what all logits' gradients have subtracted.

    Beside a window of at most SMALL rows the mass is on the slots, whose values are alike, and the
    rounding of `out` would show: there delta is the window's own part, sum_r p_r (dout_t . v_r),
    and `backward_slots.readers` adds the slots' part from its own products.

    Roofline (B=1, N=32, V=128, bf16, T=32768): reads outputs and their gradients 537 MB: 0.13 ms at
    4.2 TB/s.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    k = head // (N // K)
    w = tl.load(window)
    j = tl.arange(0, C)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    row = (b * T + t) * N + head
    dout = rows_of(out_grad, row, n >= 0, V, BLOCK_V)
    if w > SMALL:
        given = rows_of(out, row, n >= 0, V, BLOCK_V).to(tl.float32)
        d = tl.sum(given * dout.to(tl.float32), 1)
        mass = tl.load(share + row, mask=n >= 0, other=0.0)
        d += mass * tl.load(share_grad + row, mask=n >= 0, other=0.0)
    else:
        d = tl.zeros([C], tl.float32)
        reach = tl.minimum(n, w - 1)
        sees = (n >= 0) & (reach >= 0)
        first = t + P - reach
        lowest = tl.min(tl.where(sees, first, T + P), 0)
        end = tl.max(tl.where(sees, t + P + 1, 0), 0)
        q = rows_of(query, row, sees, H, BLOCK_H)
        log_sum = tl.load(lse + row, mask=t < T, other=0.0)
        for start in range(lowest, end, C):
            key_row = start + j
            inside = key_row < end
            at = (b * (T + P) + key_row) * K + k
            keys = rows_of(key, at, inside, H, BLOCK_H)
            values = rows_of(value, at, inside, V, BLOCK_V)
            visible = (key_row[None, :] >= first[:, None]) & (key_row[None, :] <= (t + P)[:, None])
            visible = visible & sees[:, None]
            logits = product(q, tl.trans(keys), PRECISION) * (SCALE * LOG2E) - log_sum[:, None]
            weights = tl.where(visible, tl.exp2(tl.where(visible, logits, 0.0)), 0.0)
            d += tl.sum(weights * product(dout, tl.trans(values), PRECISION), 1)
    tl.store(delta + row, d, mask=t < T)


@triton.jit
def queries(
    query,
    key,
    value,
    number,
    window,
    lse,
    delta,
    out_grad,
    T,
    P,
    query_grad,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the queries of one chunk and head: sum over the window of scale dL k_r.

    Roofline (B=1, N=32, K=8, H=V=128, W=64, bf16, T=32768): reads queries, output gradients 537 MB,
    keys and values 134 MB, writes 268 MB: 0.94 GB, 0.22 ms at 4.2 TB/s; 4 C T N (2 H + V) =
    103 GFLOP, 0.15 ms.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    k = head // (N // K)
    w = tl.load(window)
    j = tl.arange(0, C)
    t = chunk * C + j
    n = tl.load(number + b * T + t, mask=t < T, other=-1)
    reach = tl.minimum(n, w - 1)
    sees = (n >= 0) & (reach >= 0)
    first = t + P - reach
    lowest = tl.min(tl.where(sees, first, T + P), 0)
    end = tl.max(tl.where(sees, t + P + 1, 0), 0)
    row = (b * T + t) * N + head
    dq = tl.zeros([C, BLOCK_H], tl.float32)
    if lowest < end:
        q = rows_of(query, row, sees, H, BLOCK_H)
        dout = rows_of(out_grad, row, sees, V, BLOCK_V)
        log_sum = tl.load(lse + row, mask=t < T, other=0.0)
        d = tl.load(delta + row, mask=t < T, other=0.0)
        for start in range(lowest, end, C):
            key_row = start + j
            inside = key_row < end
            at = (b * (T + P) + key_row) * K + k
            keys = rows_of(key, at, inside, H, BLOCK_H)
            values = rows_of(value, at, inside, V, BLOCK_V)
            visible = (key_row[None, :] >= first[:, None]) & (key_row[None, :] <= (t + P)[:, None])
            visible = visible & sees[:, None]
            logits = product(q, tl.trans(keys), PRECISION) * (SCALE * LOG2E) - log_sum[:, None]
            weights = tl.exp2(tl.where(visible, logits, 0.0))
            grads = product(dout, tl.trans(values), PRECISION) - d[:, None]
            grads = tl.where(visible, weights * grads, 0.0) * SCALE
            dq = product_onto(grads, keys, dq, PRECISION)
    store_rows(query_grad, row, t < T, dq, H, BLOCK_H)


@triton.jit
def keys_values(
    query,
    key,
    value,
    number,
    last,
    window,
    lse,
    delta,
    out_grad,
    T,
    P,
    key_grad,
    value_grad,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of C keys and values of one kv head, over the queries that see them.

    `last` [B, S] is the last row of the segment that a row belongs to. The heads of the group are
    summed in a fixed order, without atomics.

    Roofline (B=1, N=32, K=8, H=V=128, W=64, bf16, T=32768): reads queries and output gradients
    twice (1.07 GB, the second time from L2), keys and values 134 MB, writes 134 MB: 0.80 GB, 0.19
    ms at 4.2 TB/s; 8 C T N (H + V) / 2 = 137 GFLOP, 0.20 ms.
    """
    k = tl.program_id(0)
    block = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    G: tl.constexpr = N // K
    w = tl.load(window)
    j = tl.arange(0, C)
    key_row = block * C + j
    at = (b * (T + P) + key_row) * K + k
    in_keys = key_row < T + P
    keys = rows_of(key, at, in_keys, H, BLOCK_H)
    values = rows_of(value, at, in_keys, V, BLOCK_V)
    ends = tl.load(last + b * (T + P) + key_row, mask=in_keys, other=-1)
    # Of the tokens that see a row, the last is W - 1 rows on or the last of the segment.
    end = tl.max(tl.minimum(ends, key_row + tl.minimum(w - 1, T + P)), 0) + 1 - P
    start = tl.maximum(block * C - P, 0)
    steps = tl.maximum(tl.cdiv(end - start, C), 0) * (w > 0).to(tl.int32)
    dk = tl.zeros([C, BLOCK_H], tl.float32)
    dv = tl.zeros([C, BLOCK_V], tl.float32)
    for step in range(steps * G):
        t = start + step // G * C + j
        n = tl.load(number + b * T + t, mask=t < T, other=-1)
        reach = tl.minimum(n, w - 1)
        sees = (n >= 0) & (reach >= 0)
        row = (b * T + t) * N + k * G + step % G
        q = rows_of(query, row, sees, H, BLOCK_H)
        dout = rows_of(out_grad, row, sees, V, BLOCK_V)
        log_sum = tl.load(lse + row, mask=sees, other=0.0)
        d = tl.load(delta + row, mask=sees, other=0.0)
        visible = key_row[:, None] >= (t + P - reach)[None, :]
        visible = visible & (key_row[:, None] <= (t + P)[None, :]) & sees[None, :]
        logits = product(keys, tl.trans(q), PRECISION) * (SCALE * LOG2E) - log_sum[None, :]
        weights = tl.where(visible, tl.exp2(tl.where(visible, logits, 0.0)), 0.0)
        dv = product_onto(weights, dout, dv, PRECISION)
        grads = product(values, tl.trans(dout), PRECISION) - d[None, :]
        grads = weights * grads * SCALE
        dk = product_onto(grads, q, dk, PRECISION)
    store_rows(key_grad, at, in_keys, dk, H, BLOCK_H)
    store_rows(value_grad, at, in_keys, dv, V, BLOCK_V)
