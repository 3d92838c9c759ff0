"""The long-term memory in chunks: states at chunk starts, and the readout.

Works on *shifted* sequences: position t holds the token that is written at time t, which is the one
that leaves the window (DESIGN section 2).

Decay between two positions of one chunk is exact for any gates. A running sum G and exp(G_t - G_j)
would not be: exp(-G_j) overflows, and the difference loses the small gates behind a large one.
Instead the chunk is halved again and again. Writer j and reader t are separated by the middle of
exactly one block; there

    exp(sum of gates in (j, t]) = exp(sum in (j, middle]) * exp(sum in (middle, t])

and both exponents are sums of the gates that are really passed, hence never positive and never a
difference. Pairs inside one of the smallest blocks (`_LEAF` positions) are written out. All sums
are products with 0/1 matrices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nha_jax.ops.window_attention import EMPTY_LSE

# Pairs of positions this close are written out, [_LEAF, _LEAF, M] factors a leaf.
_LEAF = 4


class Chunks(NamedTuple):
    """What is written to the slots, in n chunks of C positions.

    Attributes:
        key_value: [B, n, K, C, H+V], slot key and value of the token written at each position.
        log_gate: [B, n, K, C, M], 0 where nothing is written.
        strength: [B, n, K, C, M], 1 - exp(log_gate), 0 where nothing is written.
        start: [B, n, C], index at which the position's segment begins, from `SegmentLayout`.
        chunk_start: [n], index of each chunk's first position.
    """

    key_value: Float[Array, "B n K C HV"]
    log_gate: Float[Array, "B n K C M"]
    strength: Float[Array, "B n K C M"]
    start: Int[Array, "B n C"]
    chunk_start: Int[Array, " n"]

    @property
    def reads_carry(self) -> Bool[Array, "B n C"]:
        """Whether the position's segment began before the chunk."""
        return self.start < self.chunk_start[None, :, None]


class _Decays(NamedTuple):
    """Decay factors inside a chunk; the write strength of the writer is multiplied in.

    Attributes:
        left: Per halving, [..., blocks, h, M]: from a writer in the left half to the middle.
        right: Per halving, [..., blocks, h, M]: from the middle to a reader in the right half.
        leaf: [..., leaves, l, l, M]: from writer j to reader t of one leaf, as (t, j); 0 for j > t.
    """

    left: list[Float[Array, "*lead blocks h M"]]
    right: list[Float[Array, "*lead blocks h M"]]
    leaf: Float[Array, "*lead leaves l l M"]


def _summed(matrix: np.ndarray, log_gate):
    """Sums of gates, one per row of a 0/1 matrix [R, C]: [..., C, M] -> [..., R, M]."""
    ones = jnp.asarray(matrix, log_gate.dtype)
    # True float32 whatever the inputs: these are exponents.
    return jnp.einsum("rc,...cm->...rm", ones, log_gate, precision=jax.lax.Precision.HIGHEST)


def _decays(log_gate, strength) -> _Decays:
    *lead, size, num_slots = log_gate.shape
    position = np.arange(size)
    reader, passed = position[:, None], position[None, :]
    halves, rows = [], []
    half = size // 2
    while half >= _LEAF:
        middle = reader // (2 * half) * (2 * half) + half  # first position of the right half
        before = (passed > reader) & (passed < middle)
        after = (passed >= middle) & (passed <= reader)
        halves.append(half)
        rows.append(before | after)
        half //= 2
    left, right = [], []
    if halves:
        factors = jnp.exp(_summed(np.concatenate(rows), log_gate))
        factors = factors.reshape(*lead, len(halves), size, num_slots)
        for index, half in enumerate(halves):
            shape = (*lead, size // (2 * half), 2, half, num_slots)
            factor = factors[..., index, :, :].reshape(shape)
            left.append(factor[..., 0, :, :] * strength.reshape(shape)[..., 0, :, :])
            right.append(factor[..., 1, :, :])

    leaf = min(_LEAF, size)
    reader, writer, passed = np.ogrid[:leaf, :leaf, :leaf]
    pairs = ((passed > writer) & (passed <= reader)).reshape(leaf * leaf, leaf)
    shape = (*lead, size // leaf, leaf, leaf, num_slots)
    inside = jnp.exp(_summed(pairs, log_gate.reshape(*lead, -1, leaf, num_slots))).reshape(shape)
    inside = inside * strength.reshape(*lead, -1, 1, leaf, num_slots)
    causal = np.tri(leaf, dtype=bool).reshape((1,) * (len(shape) - 3) + (leaf, leaf, 1))
    return _Decays(left, right, jnp.where(causal, inside, 0))


def chunk_states(
    chunks: Chunks, initial: Float[Array, "B K M HV"], precision: jax.lax.Precision
) -> tuple[Float[Array, "B n K M HV"], Float[Array, "B K M HV"]]:
    """Slots before each chunk and after the last one.

    The chunks' own contributions are independent of each other and computed at once; only the
    first-order scan over them is sequential.
    """
    size = chunks.log_gate.shape[-2]
    to_end = jnp.exp(_summed(np.tri(size, k=-1).T, chunks.log_gate))
    whole = jnp.exp(jnp.sum(chunks.log_gate, axis=-2))
    last = chunks.start[:, :, -1:]
    survives = chunks.start == last  # written to the segment that is open at the chunk's end
    weight = to_end * chunks.strength * survives[:, :, None, :, None]
    written = jnp.einsum("bnkcm,bnkch->bnkmh", weight, chunks.key_value, precision=precision)
    kept = whole * chunks.reads_carry[:, :, -1, None, None]

    def advance(slots, chunk):
        kept, written = chunk
        return kept[..., None] * slots + written, slots

    xs = (jnp.moveaxis(kept, 1, 0), jnp.moveaxis(written, 1, 0))
    final, before = jax.lax.scan(advance, initial, xs)
    return jnp.moveaxis(before, 0, 1), final


def read_slots(
    query: Float[Array, "B n K G C H"],
    chunks: Chunks,
    slots: Float[Array, "B n K M HV"],
    readable: Bool[Array, "B n C"],
    window_out: Float[Array, "B n K G C V"],
    window_lse: Float[Array, "B n K G C"],
    precision: jax.lax.Precision,
) -> tuple[Float[Array, "B n K G C V"], Float[Array, "B n K G C"]]:
    """One softmax over the slots and a window that was already summed up by its log-sum-exp.

    Args:
        query: Scaled slot queries.
        chunks: What is written in these chunks.
        slots: Slots before each chunk.
        readable: Where slots take part in the softmax.
        window_out: The window's own normalised output.
        window_lse: Its log-sum-exp.
        precision: Of the products.

    Returns:
        (output over both memories, share of the softmax mass on slots).
    """
    width = query.shape[-1]
    decays = _decays(chunks.log_gate, chunks.strength)
    from_start = jnp.exp(_summed(np.tri(chunks.log_gate.shape[-2]), chunks.log_gate))
    key, value = chunks.key_value[..., :width], chunks.key_value[..., width:]
    slot_key, slot_value = slots[..., :width], slots[..., width:]
    carried = (from_start * chunks.reads_carry[:, :, None, :, None])[:, :, :, None]

    logits = carried * jnp.einsum("bnkgch,bnkmh->bnkgcm", query, slot_key, precision=precision)
    products = jnp.einsum("bnkgch,bnkjh->bnkgcj", query, key, precision=precision)
    same_segment = chunks.start[..., :, None] == chunks.start[..., None, :]
    products = jnp.where(same_segment[:, :, None, None], products, 0)
    logits += _spread_over_slots(products, decays, precision)

    readable = readable[:, :, None, None, :, None]
    top = jnp.max(jnp.where(readable, logits, EMPTY_LSE), axis=-1)
    top = jax.lax.stop_gradient(jnp.maximum(top, window_lse))
    weights = jnp.where(readable, jnp.exp(jnp.where(readable, logits, 0) - top[..., None]), 0)
    window_weight = jnp.where(window_lse > EMPTY_LSE, jnp.exp(window_lse - top), 0)
    total = jnp.sum(weights, axis=-1) + window_weight
    total = jnp.where(total > 0, total, 1)
    weights = weights / total[..., None]
    window_weight = window_weight / total

    out = jnp.einsum("bnkgcm,bnkmv->bnkgcv", weights * carried, slot_value, precision=precision)
    mixed = _collect_from_slots(weights, decays, precision)
    mixed = jnp.where(same_segment[:, :, None, None], mixed, 0)
    out += jnp.einsum("bnkgcj,bnkjv->bnkgcv", mixed, value, precision=precision)
    out += window_weight[..., None] * window_out
    return out, jnp.sum(weights, axis=-1)


def _spread_over_slots(products, decays: _Decays, precision):
    """sum_j products[t, j] * decay[t, j, m] over writers j <= t: [..., C, C] -> [..., C, M].

    The heads of a group, axis 3 of `products`, share their decays.
    """
    *lead, size, _ = products.shape
    leaf = decays.leaf.shape[-2]
    squares = _diagonal(products.reshape(*lead, size // leaf, leaf, size // leaf, leaf))
    logits = jnp.sum(squares[..., None] * decays.leaf[:, :, :, None], axis=-2)
    logits = logits.reshape(*lead, size, -1)
    for left, right in zip(decays.left, decays.right, strict=True):
        blocks, half = left.shape[-3:-1]
        split = products.reshape(*lead, blocks, 2, half, blocks, 2, half)
        squares = _diagonal(split[..., 1, :, :, 0, :])
        read = jnp.einsum("bnkgxtj,bnkxjm->bnkgxtm", squares, left, precision=precision)
        read = read * right[:, :, :, None]
        logits += jnp.stack([jnp.zeros_like(read), read], axis=-3).reshape(logits.shape)
    return logits


def _collect_from_slots(weights, decays: _Decays, precision):
    """sum_m weights[t, m] * decay[t, j, m]: [..., C, M] -> [..., C, C]; spreading transposed."""
    *lead, size, num_slots = weights.shape
    leaf = decays.leaf.shape[-2]
    rows = weights.reshape(*lead, size // leaf, leaf, 1, num_slots)
    squares = jnp.sum(rows * decays.leaf[:, :, :, None], axis=-1)
    mixed = _on_diagonal(squares).reshape(*lead, size, size)
    for left, right in zip(decays.left, decays.right, strict=True):
        blocks, half = left.shape[-3:-1]
        rows = weights.reshape(*lead, blocks, 2, half, num_slots)[..., 1, :, :]
        rows = rows * right[:, :, :, None]
        squares = jnp.einsum("bnkgxtm,bnkxjm->bnkgxtj", rows, left, precision=precision)
        placed = _on_diagonal(squares)  # [..., blocks, h, blocks, h]
        placed = jnp.stack([placed, jnp.zeros_like(placed)], axis=-2)
        placed = jnp.stack([jnp.zeros_like(placed), placed], axis=-5)
        mixed += placed.reshape(mixed.shape)
    return mixed


def _diagonal(x):
    """[..., blocks, a, blocks, b] -> [..., blocks, a, b]."""
    return jnp.sum(jnp.where(_same_block(x.shape[-2], x.ndim), x, 0), axis=-2)


def _on_diagonal(x):
    """[..., blocks, a, b] -> [..., blocks, a, blocks, b], 0 off the diagonal."""
    return jnp.where(_same_block(x.shape[-3], x.ndim + 1), x[..., None, :], 0)


def _same_block(blocks: int, ndim: int):
    same = np.eye(blocks, dtype=bool)
    return same.reshape((1,) * (ndim - 4) + (blocks, 1, blocks, 1))
