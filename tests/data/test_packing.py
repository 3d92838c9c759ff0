"""Nothing is lost, nothing is doubled, nothing is mixed: the plan of rows and the rows."""

import numpy as np
import pytest

from nha_jax.data.packing import build_row, plan_rows

PAD = 999


def _store(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens 0, 1, 2, ... so that every token names its place; starts and lengths of documents."""
    length = np.array(lengths, np.int64)
    start = np.cumsum(length) - length
    return np.arange(length.sum(), dtype=np.uint32) + 1000, start, length


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("sequence_length", [1, 2, 3, 7, 16, 31, 64])
@pytest.mark.parametrize("case", range(4))
def test_rows_hold_every_pair_of_neighbours_once(
    case: int, sequence_length: int, packing: bool
) -> None:
    rng = np.random.RandomState(100 * case + sequence_length)
    lengths = rng.randint(2, rng.choice([3, 10, 70]) + 1, size=rng.randint(1, 40)).tolist()
    tokens, start, length = _store(lengths)
    plan = plan_rows(start, length, sequence_length, packing=packing)
    seen: list[tuple[int, int]] = []
    for row in range(plan.num_rows):
        arrays = build_row(tokens, plan, row, sequence_length, PAD)
        segment, mask = arrays["segment_ids"], arrays["loss_mask"]
        filled = int((segment > 0).sum())
        assert filled > 0
        # Segments are 1, 2, ... in unbroken runs, and padding stands at the end only.
        assert (np.diff(segment[:filled]) >= 0).all()
        assert set(np.diff(segment[:filled])) <= {0, 1}
        assert segment[0] == 1
        assert (segment[filled:] == 0).all()
        if not packing:
            assert segment.max() == 1
        np.testing.assert_array_equal(mask, segment > 0)
        for name, blank in (("tokens", PAD), ("targets", PAD), ("positions", 0)):
            assert (arrays[name][filled:] == blank).all()
        for i in range(1, segment.max() + 1):
            here = segment == i
            np.testing.assert_array_equal(arrays["positions"][here], np.arange(here.sum()))
            # Consecutive places of the store, of one document: no segment mixes two.
            inside = arrays["tokens"][here].astype(np.int64) - 1000
            np.testing.assert_array_equal(np.diff(inside), 1)
            owner = np.searchsorted(start, inside, side="right") - 1
            assert len(set(owner)) == 1
            assert (inside[0] - start[owner[0]]) % sequence_length == 0
            assert inside[-1] + 1 < start[owner[0]] + length[owner[0]]
        seen += zip(arrays["tokens"][mask == 1], arrays["targets"][mask == 1], strict=True)
    expected = [
        (tokens[s + i], tokens[s + i + 1])
        for s, n in zip(start, length, strict=True)
        for i in range(n - 1)
    ]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("case", range(20))
def test_best_fit_leaves_no_two_rows_that_fit_in_one(case: int) -> None:
    rng = np.random.RandomState(case)
    lengths = rng.randint(2, rng.choice([4, 12, 31]), size=rng.randint(2, 60)).tolist()
    _, start, length = _store(lengths)
    plan = plan_rows(start, length, 32, packing=True)
    filled = np.add.reduceat(plan.piece_length, plan.row_start[:-1])
    assert filled.max() <= 32
    if plan.num_rows > 1:
        assert np.sort(filled)[:2].sum() > 32


def test_a_plan_is_the_same_every_time_and_its_rows_are_mixed() -> None:
    _, start, length = _store([65] * 30)
    first, second = (plan_rows(start, length, 32, packing=True) for _ in range(2))
    for name in ("row_start", "piece_start", "piece_length"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert (np.diff(first.piece_start) < 0).any()


def test_waste_is_small_on_lengths_like_those_of_text() -> None:
    length = np.random.RandomState(1).lognormal(6.0, 1.2, size=3000).astype(np.int64) + 2
    start = np.cumsum(length) - length
    plan = plan_rows(start, length, 1024, packing=True)
    assert (length - 1).sum() / (plan.num_rows * 1024) > 0.995


def test_a_row_past_the_end_is_padding() -> None:
    tokens, start, length = _store([5])
    plan = plan_rows(start, length, 8, packing=True)
    row = build_row(tokens, plan, plan.num_rows, 8, PAD)
    assert (row["tokens"] == PAD).all()
    assert not row["segment_ids"].any()
    assert not row["loss_mask"].any()
    assert all(array.dtype == np.int32 for array in row.values())


@pytest.mark.parametrize("packing", [True, False])
def test_no_documents_make_no_rows(packing: bool) -> None:
    nothing = np.zeros(0, np.int64)
    assert plan_rows(nothing, nothing, 8, packing=packing).num_rows == 0
