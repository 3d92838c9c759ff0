"""What packing, padding and the window mean to the kernels: small integer arrays, made once a call.

All masks follow from two numbers a token (`reach`, `slot_from`); loops over window tiles follow
from `tiles_back`, so that a traced window, and short segments, cost what they really reach.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas.mosaic.tiles import TILE

# Values of `Plan.write`.
UNWRITTEN, WRITTEN, LASTING = 0, 1, 2
# A traced window's value for full attention, in which not even sinks are read.
FULL = 2**30


class Plan(NamedTuple):
    """Masks of one call; n chunks of `TILE` tokens.

    Attributes:
        reach: [B, n * TILE], tokens before this one that its window holds; -1 at padding.
        slot_from: [B, n * TILE], index in its chunk of the first write that the token's slots
            hold; -1 where they also hold what came before the chunk, `TILE` where the token reads
            no slots.
        write: [B, n * TILE], whether the token that leaves at this position is written (`WRITTEN`),
            and to the segment that is open at the chunk's end (`LASTING`).
        kept: [B, n], 1 where what the slots held before the chunk survives it, else 0.
        tiles_back: [B, n], how many tiles before its own a chunk's windows reach into.
        last_reader: [B, key tiles], last chunk whose windows reach into the tile.
    """

    reach: Int[Array, "B T"]
    slot_from: Int[Array, "B T"]
    write: Int[Array, "B T"]
    kept: Float[Array, "B n"]
    tiles_back: Int[Array, "B n"]
    last_reader: Int[Array, "B keys"]


def make_plan(
    number: Int[Array, "B T"], window: int | None | Array, *, sink: bool, history_tiles: int
) -> Plan:
    """Derives the plan from the tokens' numbers in their segments; T is a multiple of `TILE`."""
    batch, length = number.shape
    chunks = length // TILE
    row = jnp.arange(length, dtype=jnp.int32)[None]
    chunk_start = row // TILE * TILE
    is_token = number >= 0
    span = length + TILE * history_tiles if window is None else window
    reach = jnp.where(is_token, jnp.minimum(number, span - 1), -1)
    start = jax.lax.cummax(jnp.where(number == 0, row, -1), axis=1)
    written = is_token & (number >= span)
    sinks = sink if window is None or isinstance(window, int) else sink & (window < FULL)
    readable = is_token & (written | sinks)
    local_start = jnp.maximum(start - chunk_start, -1)
    by_chunk = local_start.reshape(batch, chunks, TILE)
    open_from = by_chunk[:, :, -1:]
    lasting = (row - chunk_start).reshape(1, chunks, TILE) >= open_from
    lasting = written & lasting.reshape(batch, length)
    beyond = jnp.maximum(reach - (row - chunk_start), 0).reshape(batch, chunks, TILE)
    tiles_back = jnp.max(-(-beyond // TILE), axis=2)
    oldest = jnp.arange(chunks, dtype=jnp.int32)[None] + history_tiles - tiles_back
    # The oldest tile in reach never moves back over the tokens, but for chunks of padding alone.
    oldest = jax.lax.cummin(oldest, axis=1, reverse=True)
    tiles = jnp.arange(chunks + history_tiles, dtype=jnp.int32)
    readers = jax.vmap(lambda x: jnp.searchsorted(x, tiles, side="right"))(oldest)
    return Plan(
        reach=reach.astype(jnp.int32),
        slot_from=jnp.where(readable, local_start, TILE).astype(jnp.int32),
        write=(written.astype(jnp.int32) + lasting.astype(jnp.int32)),
        kept=(open_from[:, :, 0] < 0).astype(jnp.float32),
        tiles_back=tiles_back.astype(jnp.int32),
        last_reader=(readers - 1).astype(jnp.int32),
    )
