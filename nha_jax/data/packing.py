"""The plan of rows: which piece of which document stands in which row, made once from lengths.

A document of n tokens is n - 1 pairs of an input token and the token after it as its target. The
pairs are cut into pieces of at most T; a piece is one segment of one row. So every token but the
first of a document is a target exactly once, also across the cuts.
"""

import dataclasses

import numpy as np

_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Rows as lists of pieces, in one flat array each.

    Attributes:
        row_start: int64 [R + 1]; row r holds the pieces `row_start[r]` to `row_start[r + 1] - 1`.
        piece_start: int64 [P]; place of the piece's first input token in the token store.
        piece_length: int32 [P]; number of input tokens, 1 to T.
    """

    row_start: np.ndarray
    piece_start: np.ndarray
    piece_length: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows of an epoch (R)."""
        return len(self.row_start) - 1


def plan_rows(
    document_start: np.ndarray,
    document_length: np.ndarray,
    sequence_length: int,
    *,
    packing: bool,
) -> RowPlan:
    """Cuts documents into pieces and packs the pieces into rows.

    Packing is best fit, longest piece first: a piece goes where the least room is left that holds
    it. The order of the rows is a fixed permutation, so that a prefix of them is a fair sample.

    Args:
        document_start: int64 [D]; place of each document's first token in the token store.
        document_length: int64 [D]; tokens of each document, at least 2.
        sequence_length: Tokens in a row (T).
        packing: False gives every piece a row of its own.

    Returns:
        The plan, the same for the same arguments on every machine.
    """
    pairs = np.asarray(document_length, np.int64) - 1
    pieces = -(-pairs // sequence_length)
    document = np.repeat(np.arange(len(pairs)), pieces)
    # Number of each piece within its document.
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * sequence_length
    start = np.asarray(document_start, np.int64)[document] + offset
    length = np.minimum(sequence_length, pairs[document] - offset)
    row_of_piece = _best_fit(length, sequence_length) if packing else np.arange(len(length))
    num_rows = int(row_of_piece.max(initial=-1)) + 1
    # RandomState, because NumPy promises that its streams never change.
    row_of_piece = np.random.RandomState(0).permutation(num_rows)[row_of_piece]
    order = np.argsort(row_of_piece, kind="stable")
    counts = np.bincount(row_of_piece, minlength=num_rows)
    row_start = np.zeros(num_rows + 1, np.int64)
    np.cumsum(counts, out=row_start[1:])
    return RowPlan(row_start, start[order], length[order].astype(np.int32))


def build_row(
    tokens: np.ndarray, plan: RowPlan, row: int, sequence_length: int, pad_id: int
) -> dict[str, np.ndarray]:
    """Assembles a row.

    Args:
        tokens: Token ids of the whole store.
        plan: The plan.
        row: Number of the row, or `plan.num_rows` and above for a row of padding only.
        sequence_length: Tokens in a row (T).
        pad_id: Id that fills `tokens` and `targets` where there is no text.

    Returns:
        int32 [T] arrays: `tokens`; `targets`, the next token of the same document; `segment_ids`,
        from 1, 0 for padding; `positions`, from 0 in each segment; `loss_mask`, 1 where the
        target is real.
    """
    result = {
        "tokens": np.full(sequence_length, pad_id, np.int32),
        "targets": np.full(sequence_length, pad_id, np.int32),
        "segment_ids": np.zeros(sequence_length, np.int32),
        "positions": np.zeros(sequence_length, np.int32),
        "loss_mask": np.zeros(sequence_length, np.int32),
    }
    if row >= plan.num_rows:
        return result
    first, last = int(plan.row_start[row]), int(plan.row_start[row + 1])
    begin = 0
    for segment, piece in enumerate(range(first, last), start=1):
        start, length = int(plan.piece_start[piece]), int(plan.piece_length[piece])
        here = slice(begin, begin + length)
        text = tokens[start : start + length + 1]
        result["tokens"][here] = text[:-1]
        result["targets"][here] = text[1:]
        result["segment_ids"][here] = segment
        result["positions"][here] = np.arange(length)
        result["loss_mask"][here] = 1
        begin += length
    return result


def _best_fit(length: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing.

    Args:
        length: int64 [P]; length of each piece, 1 to `capacity`.
        capacity: Room of an empty row.

    Returns:
        int64 [P]; the row of each piece, rows numbered in the order they were opened.
    """
    if int(length.sum()) <= capacity:
        return np.zeros(len(length), np.int64)
    row_of_piece = np.empty(len(length), np.int64)
    order = np.argsort(-length, kind="stable")
    open_rows: dict[int, list[int]] = {}  # Room left -> rows with just that room.
    rooms = 0  # Bit r is set where there is an open row with room r.
    num_rows = 0
    for begin in range(0, len(order), _CHUNK):
        chunk = order[begin : begin + _CHUNK]
        rows = np.empty(len(chunk), np.int64)
        for i, size in enumerate(length[chunk].tolist()):
            fitting = rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                same_room = open_rows[room]
                row = same_room.pop()
                if not same_room:
                    rooms ^= 1 << room
            else:
                room, row = capacity, num_rows
                num_rows += 1
            rows[i] = row
            left = room - size
            if left:
                open_rows.setdefault(left, []).append(row)
                rooms |= 1 << left
        row_of_piece[chunk] = rows
    return row_of_piece
