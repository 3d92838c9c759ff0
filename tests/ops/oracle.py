"""Section 1 of the design in NumPy float64, token by token: the judge of every implementation.

It shares no code with the library and keeps to lists and loops: for each token the slots are folded
anew from all the tokens that have left the window, and one softmax runs over what can be seen.
"""

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    out: np.ndarray  # [B, T, N, V]
    slot_share: np.ndarray  # [B, T, N]
    slot_key: np.ndarray  # [B, K, M, H], after the last token
    slot_value: np.ndarray  # [B, K, M, V]


def evaluate(
    query,
    key,
    value,
    log_gate,
    *,
    window,
    slot_query=None,
    slot_key=None,
    rotary=None,
    segment_ids=None,
    scale=None,
    empty_slots="masked",
) -> Result:
    """Evaluates the operator on float64 copies of the inputs."""
    query, key, value, log_gate = (np.asarray(x, np.float64) for x in (query, key, value, log_gate))
    slot_query = query if slot_query is None else np.asarray(slot_query, np.float64)
    slot_key = key if slot_key is None else np.asarray(slot_key, np.float64)
    batch, length, num_heads, width = query.shape
    num_kv_heads, num_slots = log_gate.shape[2:]
    scale = width**-0.5 if scale is None else scale
    if rotary is not None:
        query, key = rotate(query, *rotary), rotate(key, *rotary)
    if segment_ids is None:
        segment_ids = np.ones((batch, length), int)
    out = np.zeros((batch, length, num_heads, value.shape[3]))
    share = np.zeros((batch, length, num_heads))
    final_key = np.zeros((batch, num_kv_heads, num_slots, width))
    final_value = np.zeros((batch, num_kv_heads, num_slots, value.shape[3]))
    for b in range(batch):
        segment: list[int] = []
        previous = 0
        for t in range(length):
            if segment_ids[b, t] == 0:
                continue
            if segment_ids[b, t] != previous:
                segment, previous = [], segment_ids[b, t]
            segment.append(t)
            left = segment[: max(len(segment) - window, 0)] if window is not None else []
            held = segment[len(left) :]
            for k in range(num_kv_heads):
                keys, values = np.zeros((num_slots, width)), np.zeros((num_slots, value.shape[3]))
                for e in left:
                    retained = np.exp(log_gate[b, e, k])[:, None]
                    written = -np.expm1(log_gate[b, e, k])[:, None]
                    keys = retained * keys + written * slot_key[b, e, k]
                    values = retained * values + written * value[b, e, k]
                final_key[b, k], final_value[b, k] = keys, values
                slots_read = window is not None and (len(left) > 0 or empty_slots == "sink")
                for n in range(k * num_heads // num_kv_heads, (k + 1) * num_heads // num_kv_heads):
                    slot_logits = scale * keys @ slot_query[b, t, n]
                    logits = scale * key[b, held, k] @ query[b, t, n]
                    seen = value[b, held, k]
                    if slots_read:
                        logits = np.concatenate([slot_logits, logits])
                        seen = np.concatenate([values, seen])
                    if logits.size == 0:
                        continue
                    weights = np.exp(logits - logits.max())
                    weights /= weights.sum()
                    out[b, t, n] = weights @ seen
                    share[b, t, n] = weights[:num_slots].sum() if slots_read else 0
    return Result(out, share, final_key, final_value)


def rotate(x, cos, sin):
    """Half-split rotation of [B, T, heads, H] by tables [T, H/2] or [B, T, H/2]."""
    cos, sin = (np.asarray(a, np.float64) for a in (cos, sin))
    cos, sin = (np.broadcast_to(a, (x.shape[0], *a.shape[-2:]))[:, :, None] for a in (cos, sin))
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def relative_error(found, expected) -> float:
    """||found - expected|| / ||expected||, absolute where the latter is 0 (DESIGN section 5)."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / (norm if norm > 0 else 1.0))
