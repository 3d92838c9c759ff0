"""Sliding-window and causal attention in blocks, with a running maximum and sum.

Memory is linear in T whatever the window: no T x W array ever exists, and the backward pass
recomputes the weights from the log-sum-exp. The log-sum-exp is returned, in the accumulator's
precision, so that a second memory can be merged into the same softmax.

Which keys a query sees is one number a query: how many tokens it may look back (`reach`). All else
(windows, segments, padding, an initial state's tokens) is folded into that number beforehand.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Stands for log(0): finite, so that differences of two of them are not NaN.
EMPTY_LSE = -1e30
# Elements of logits that may live at once; bounds memory and keeps a CPU's caches warm.
_LOGITS_BUDGET = 1 << 22
# Up to this many key blocks a query block, the loop over them is unrolled at compile time.
_MAX_UNROLLED = 4


class _Plan(NamedTuple):
    """Static facts of one call.

    Attributes:
        block: Tokens in a block.
        group: Query blocks that are worked on at once.
        history_blocks: Key blocks before the first query's block.
        front: Zero blocks before those, so that slices never start before 0.
        static_blocks: Number of key blocks a query block looks at, or None if `far` decides.
        precision: Of the products.
    """

    block: int
    group: int
    history_blocks: int
    front: int
    static_blocks: int | None
    precision: jax.lax.Precision


def windowed_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    reach: Int[Array, "B T"],
    *,
    far: int | Int[Array, ""],
    precision: jax.lax.Precision,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Softmax attention of T queries to themselves and the tokens before them.

    Args:
        query: Scaled queries, in the accumulator's dtype.
        key: Keys of S >= T tokens; the last T of them belong to the queries' own tokens.
        value: Values of the same tokens.
        reach: How many tokens before its own each query sees; 0 for its own only, -1 for none.
        far: An upper bound on `reach`, static or a traced scalar. The work grows with it.
        precision: Of the products.

    Returns:
        (normalised output, 0 where nothing is seen; log-sum-exp, EMPTY_LSE where nothing is seen).
    """
    batch, length, num_heads, _ = query.shape
    num_kv_heads = key.shape[2]
    block, seen_blocks = 128, None
    if isinstance(far, int):
        block = min(block, max(16, _next_power_of_two(far + 1)))
    block = min(block, max(8, _next_power_of_two(length)))
    query_blocks = -(-length // block)
    history_blocks = -(-(key.shape[1] - length) // block)
    group = max(1, min(query_blocks, _LOGITS_BUDGET // (batch * num_heads * block * block)))
    groups = -(-query_blocks // group)
    available = history_blocks + groups * group
    if isinstance(far, int):
        seen_blocks = min(1 + -(-far // block), available)
    plan = _Plan(block, group, history_blocks, group, seen_blocks, precision)

    padded = groups * group * block
    end = padded - length
    front = (plan.front + history_blocks) * block - (key.shape[1] - length)

    def key_blocks(x):
        x = jnp.pad(x, ((0, 0), (front, end), (0, 0), (0, 0)))
        x = x.reshape(batch, -1, block, num_kv_heads, x.shape[-1])
        return x.transpose(0, 1, 3, 2, 4)  # [B, blocks, K, block, H]

    query = jnp.pad(query, ((0, 0), (0, end), (0, 0), (0, 0)))
    query = query.reshape(batch, groups, group, block, num_kv_heads, -1, query.shape[-1])
    query = query.transpose(1, 0, 2, 4, 5, 3, 6)  # [groups, B, group, K, G, block, H]
    reach = jnp.pad(reach, ((0, 0), (0, end)), constant_values=-1)
    reach = reach.reshape(batch, groups, group, block).transpose(1, 0, 2, 3)
    out, lse = _attention(
        plan, query, key_blocks(key), key_blocks(value), reach, jnp.asarray(far, jnp.int32)
    )
    out = out.transpose(1, 0, 2, 5, 3, 4, 6).reshape(batch, padded, num_heads, -1)[:, :length]
    lse = lse.transpose(1, 0, 2, 5, 3, 4).reshape(batch, padded, num_heads)[:, :length]
    return out, lse


def _next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: _Plan, query, key, value, reach, far):
    return _forward(plan, query, key, value, reach, far)


def _forward(plan, query, key, value, reach, far):
    def group(index, query, reach):
        rows = query.shape[:-1]

        def visit(offset, carry):
            top, total, out = carry
            key_block = _slice(plan, key, index, offset)
            value_block = _slice(plan, value, index, offset)
            logits = _logits(plan, query, key_block, reach, offset)
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - _finite(new_top)[..., None])
            rescale = jnp.exp(top - _finite(new_top))
            total = total * rescale + jnp.sum(weights, axis=-1)
            out = out * rescale[..., None] + _weigh(plan, weights, value_block)
            return new_top, total, out

        dtype = query.dtype
        carry = (
            jnp.full(rows, -jnp.inf, dtype),
            jnp.zeros(rows, dtype),
            jnp.zeros((*rows, value.shape[-1]), dtype),
        )
        top, total, out = _loop(plan, index, far, visit, carry)
        safe = jnp.where(total > 0, total, 1)
        return out / safe[..., None], jnp.where(total > 0, _finite(top) + jnp.log(safe), EMPTY_LSE)

    if query.shape[0] == 1:
        out, lse = group(0, query[0], reach[0])
        return out[None], lse[None]
    return jax.lax.map(lambda xs: group(*xs), (jnp.arange(query.shape[0]), query, reach))


def _forward_rule(plan, query, key, value, reach, far):
    out, lse = _forward(plan, query, key, value, reach, far)
    return (out, lse), (query, key, value, reach, far, out, lse)


def _backward_rule(plan, residuals, cotangents):
    query, key, value, reach, far, out, lse = residuals
    out_grad, lse_grad = cotangents
    # d logits = weights * (d weights - sum(out * d out) + d lse)
    delta = jnp.sum(out * out_grad, axis=-1) - lse_grad

    def group(carry, xs):
        index, query, reach, out_grad, lse, delta = xs

        def visit(offset, carry):
            query_grad, key_grad, value_grad = carry
            key_block = _slice(plan, key, index, offset)
            value_block = _slice(plan, value, index, offset)
            logits = _logits(plan, query, key_block, reach, offset)
            weights = jnp.exp(logits - lse[..., None])
            weights_grad = jnp.einsum(
                "bpkgqv,bpkjv->bpkgqj", out_grad, value_block, precision=plan.precision
            )
            logits_grad = weights * (weights_grad - delta[..., None])
            query_grad += _weigh(plan, logits_grad, key_block)
            key_grad = _accumulate(plan, key_grad, logits_grad, query, index, offset)
            value_grad = _accumulate(plan, value_grad, weights, out_grad, index, offset)
            return query_grad, key_grad, value_grad

        query_grad, *carry = _loop(plan, index, far, visit, (jnp.zeros_like(query), *carry))
        return tuple(carry), query_grad

    carry = (jnp.zeros_like(key), jnp.zeros_like(value))
    groups = query.shape[0]
    xs = (jnp.arange(groups), query, reach, out_grad, lse, delta)
    if groups == 1:
        xs = (0, *(x[0] for x in xs[1:]))
        (key_grad, value_grad), query_grad = group(carry, xs)
        query_grad = query_grad[None]
    else:
        (key_grad, value_grad), query_grad = jax.lax.scan(group, carry, xs)
    no_reach = np.zeros(reach.shape, jax.dtypes.float0)
    no_far = np.zeros((), jax.dtypes.float0)
    return query_grad, key_grad, value_grad, no_reach, no_far


_attention.defvjp(_forward_rule, _backward_rule)


def _loop(plan, index, far, visit, carry):
    """Calls `visit(offset, carry)` for every key block that the group's queries may see."""
    if plan.static_blocks is not None and plan.static_blocks <= _MAX_UNROLLED:
        for offset in range(plan.static_blocks):
            carry = visit(offset, carry)
        return carry
    blocks = 1 + (far + plan.block - 1) // plan.block
    blocks = jnp.minimum(blocks, plan.history_blocks + (index + 1) * plan.group)
    return jax.lax.fori_loop(0, blocks, visit, carry)


def _first_block(plan, index, offset):
    return plan.front + plan.history_blocks + index * plan.group - offset


def _slice(plan, blocks, index, offset):
    first = _first_block(plan, index, offset)
    return jax.lax.dynamic_slice_in_dim(blocks, first, plan.group, axis=1)


def _accumulate(plan, blocks, rows, operand, index, offset):
    """blocks[slice] += rows^T operand, summed over the heads of a group."""
    update = jnp.einsum("bpkgqj,bpkgqh->bpkjh", rows, operand, precision=plan.precision)
    first = _first_block(plan, index, offset)
    update += jax.lax.dynamic_slice_in_dim(blocks, first, plan.group, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(blocks, update, first, axis=1)


def _weigh(plan, weights, values):
    return jnp.einsum("bpkgqj,bpkjv->bpkgqv", weights, values, precision=plan.precision)


def _logits(plan, query, key_block, reach, offset):
    """Masked logits; -inf where the query does not see the key."""
    logits = jnp.einsum("bpkgqh,bpkjh->bpkgqj", query, key_block, precision=plan.precision)
    row = jnp.arange(plan.block, dtype=jnp.int32)
    distance = (offset * plan.block + row[:, None] - row[None, :])[None, None]
    seen = (distance >= 0) & (distance <= reach[..., None])  # [B, group, block, block]
    return jnp.where(seen[:, :, None, None], logits, -jnp.inf)


def _finite(top):
    """The running maximum, or 0 while nothing was seen: exp(-inf - 0) is 0, not NaN."""
    return jnp.where(jnp.isneginf(top), 0, top)
