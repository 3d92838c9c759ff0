"""Batches: complete, the same for any number of processes, and continued after a restart."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from nha_jax.data.errors import DataError
from nha_jax.data.iterator import Batch
from nha_jax.data.pipeline import TextData

OpenText = Callable[..., TextData]


def _equal(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[name], second[name]) for name in first
    )


def _take(iterator: Iterable[Batch], count: int) -> list[Batch]:
    return list(itertools.islice(iterator, count))


def _segments(batches: Iterable[Batch]) -> Counter[tuple[bytes, bytes]]:
    """Tokens and targets of every segment."""
    found: Counter[tuple[bytes, bytes]] = Counter()
    for batch in batches:
        for row in range(len(batch["tokens"])):
            for i in range(1, batch["segment_ids"][row].max() + 1):
                here = batch["segment_ids"][row] == i
                found[
                    batch["tokens"][row][here].tobytes(), batch["targets"][row][here].tobytes()
                ] += 1
    return found


def _expected(documents: Iterable[bytes], length: int) -> Counter[tuple[bytes, bytes]]:
    """The same, cut out of [BOS] + text + [EOS] by hand."""
    found: Counter[tuple[bytes, bytes]] = Counter()
    for document in documents:
        ids = np.array([257, *document, 258], np.int32)
        for begin in range(0, len(ids) - 1, length):
            end = min(begin + length, len(ids) - 1)
            found[ids[begin:end].tobytes(), ids[begin + 1 : end + 1].tobytes()] += 1
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_holds_every_document_whole_and_once(
    open_text: OpenText, corpus: Path, documents: list[bytes], packing: bool
) -> None:
    data = open_text(corpus, packing=packing, batch_size=1)
    train = _segments(_take(data.train.iterator(), data.train.num_rows_per_epoch))
    assert data.validation is not None
    validation = _segments(data.validation.iterator())
    assert train + validation == _expected(documents, 32)
    # Whole documents on either side: 3 of 60 files are 5%.
    in_validation = [d for d in documents if not _expected([d], 32) - validation]
    assert len(in_validation) == 3
    assert validation == _expected(in_validation, 32)
    assert data.report.train.documents == 57
    assert data.report.validation is not None
    assert data.report.validation.documents == 3
    targets = sum(len(d) + 1 for d in documents)
    assert data.report.train.targets + data.report.validation.targets == targets


def test_batches_are_int32_of_the_local_size(open_text: OpenText, corpus: Path) -> None:
    data = open_text(corpus, process_index=1, process_count=2)
    batch = next(data.train.iterator())
    assert set(batch) == {"tokens", "targets", "segment_ids", "positions", "loss_mask"}
    for array in batch.values():
        assert type(array) is np.ndarray
        assert array.dtype == np.int32
        assert array.shape == (2, 32)


def test_the_number_of_processes_does_not_change_global_batches(
    open_text: OpenText, corpus: Path
) -> None:
    def batches(count: int, side: str) -> list[Batch]:
        shares = []
        for index in range(count):
            data = open_text(corpus, process_index=index, process_count=count)
            split = data.train if side == "train" else data.validation
            assert split is not None
            shares.append(_take(split.iterator(), 60))
        return [
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            for parts in zip(*shares, strict=True)
        ]

    for side in ("train", "validation"):
        alone = batches(1, side)
        for count in (2, 4):
            together = batches(count, side)
            assert len(alone) == len(together)
            assert all(map(_equal, alone, together))


def test_epochs_hold_the_same_rows_in_another_order(open_text: OpenText, corpus: Path) -> None:
    data = open_text(corpus, batch_size=1)
    rows = data.train.num_rows_per_epoch
    stream = [batch["tokens"].tobytes() for batch in _take(data.train.iterator(), 2 * rows)]
    first, second = stream[:rows], stream[rows:]
    assert Counter(first) == Counter(second)
    assert first != second


def test_the_seed_orders_rows_and_leaves_the_split_alone(open_text: OpenText, corpus: Path) -> None:
    data = [open_text(corpus, seed=seed) for seed in (0, 0, 5)]
    batches = [_take(d.train.iterator(), 5) for d in data]
    assert all(map(_equal, batches[0], batches[1]))
    assert not all(map(_equal, batches[0], batches[2]))
    validation = [list(d.validation.iterator()) for d in data if d.validation is not None]
    assert all(map(_equal, validation[0], validation[2]))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_validation_is_one_pass_with_a_filled_up_last_batch(
    open_text: OpenText, corpus: Path, batch_size: int
) -> None:
    data = open_text(corpus, batch_size=batch_size, validation_fraction=0.2)
    assert data.validation is not None
    assert data.report.validation is not None
    rows = data.validation.num_rows_per_epoch
    iterator = data.validation.iterator()
    batches = list(iterator)
    assert len(batches) == data.validation.num_batches_per_epoch == -(-rows // batch_size)
    assert all(batch["tokens"].shape == (batch_size, 32) for batch in batches)
    filled = np.concatenate([batch["segment_ids"].any(axis=1) for batch in batches])
    np.testing.assert_array_equal(filled, np.arange(len(filled)) < rows)
    counted = sum(int(batch["loss_mask"].sum()) for batch in batches)
    assert counted == data.report.validation.targets
    with pytest.raises(StopIteration):
        next(iterator)
    # A second pass is the same.
    assert all(map(_equal, batches, list(data.validation.iterator())))


def test_resume_is_exact_twice_in_a_row_and_across_the_epoch(
    open_text: OpenText, corpus: Path
) -> None:
    data = open_text(corpus)
    rows = data.train.num_rows_per_epoch
    per_epoch = -(-rows // 4)
    assert rows % 4, "the epoch must end within a batch for this test"
    straight = _take(data.train.iterator(), 3 * per_epoch)
    resumed: list[Batch] = []
    state = None
    for count in (per_epoch // 2, per_epoch, 3 * per_epoch - per_epoch // 2 - per_epoch):
        iterator = open_text(corpus).train.iterator()
        if state is not None:
            iterator.set_state(state)
        resumed += _take(iterator, count)
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
    assert all(map(_equal, straight, resumed))
    assert len(straight) == len(resumed)


def test_a_state_can_be_set_on_an_iterator_in_use(open_text: OpenText, corpus: Path) -> None:
    iterator = open_text(corpus).train.iterator()
    start = iterator.get_state()
    first = _take(iterator, 3)
    iterator.set_state(start)
    assert all(map(_equal, first, _take(iterator, 3)))
    assert iterator.get_state()["next_batch"] == 3


def test_a_state_goes_on_with_another_number_of_processes(
    open_text: OpenText, corpus: Path
) -> None:
    alone = open_text(corpus).train.iterator()
    _take(alone, 7)
    following = next(alone_again := open_text(corpus).train.iterator())
    alone_again.set_state(alone.get_state())
    following = next(alone_again)
    for index in range(2):
        share = open_text(corpus, process_index=index, process_count=2).train.iterator()
        share.set_state(alone.get_state())
        here = slice(2 * index, 2 * index + 2)
        assert _equal(next(share), {name: array[here] for name, array in following.items()})


def test_a_finished_validation_pass_stays_finished(open_text: OpenText, corpus: Path) -> None:
    validation = open_text(corpus).validation
    assert validation is not None
    iterator = validation.iterator()
    list(iterator)
    again = validation.iterator()
    again.set_state(iterator.get_state())
    assert list(again) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sequence_length": 16}, "sequence_length was 32 and is 16"),
        ({"batch_size": 2}, "batch_size was 4 and is 2"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"packing": False}, "packing was True and is False"),
        ({"validation_fraction": 0.3}, "corpus was"),
    ],
)
def test_a_state_of_other_data_is_refused_by_name(
    open_text: OpenText, corpus: Path, change: dict[str, object], named: str
) -> None:
    state = open_text(corpus).train.iterator().get_state()
    with pytest.raises(DataError, match=named):
        open_text(corpus, **change).train.iterator().set_state(state)


def test_a_state_of_changed_files_is_refused(open_text: OpenText, corpus: Path) -> None:
    state = open_text(corpus).train.iterator().get_state()
    (corpus / "005.txt").write_bytes(b"another text")
    with pytest.raises(DataError, match="corpus was"):
        open_text(corpus).train.iterator().set_state(state)


@pytest.mark.parametrize("state", [{}, {"next_index": 3}, {"next_batch": -1, "fingerprint": {}}])
def test_a_state_of_something_else_is_refused(
    open_text: OpenText, corpus: Path, state: dict[str, object]
) -> None:
    with pytest.raises(DataError, match="not one of this library's"):
        open_text(corpus).train.iterator().set_state(state)


def test_a_validation_state_is_not_one_of_train(open_text: OpenText, corpus: Path) -> None:
    data = open_text(corpus)
    assert data.validation is not None
    with pytest.raises(DataError, match="split was 'train' and is 'validation'"):
        data.validation.iterator().set_state(data.train.iterator().get_state())


def test_a_closed_iterator_says_so(open_text: OpenText, corpus: Path) -> None:
    iterator = open_text(corpus).train.iterator()
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 100_000}, "sequence_length=100000 is larger than the training corpus"),
        ({"batch_size": 5000}, "batch_size=5000 is larger than the .* rows"),
        ({"process_count": 3}, "batch_size=4 must be a multiple of the number of processes, 3"),
        ({"process_index": 2, "process_count": 2}, "process_index must be in"),
        ({"vocab_size": 258}, "token ids up to 258, outside the model's vocabulary"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    open_text: OpenText, corpus: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        open_text(corpus, **change)


def test_the_report_names_what_was_dropped(open_text: OpenText, corpus: Path) -> None:
    (corpus / "100.txt").write_bytes((corpus / "000.txt").read_bytes())
    (corpus / "101.txt").write_bytes(b"")
    (corpus / "notes.md").write_text("no text for training")
    data = open_text(corpus)
    report = data.report
    assert report.duplicates == 1
    assert report.read.empty_documents == 1
    assert report.read.ignored_files == 1
    text = str(report)
    assert "1 duplicate documents, 1 empty documents, 1 files of no known format" in text
    assert f"{report.train.rows:,} rows" in text
    # The second opening comes from the cache and reports the same.
    assert open_text(corpus).report == report


def test_the_default_corpus_is_the_standard_library(open_text: OpenText) -> None:
    data = open_text("stdlib", sequence_length=512, batch_size=8)
    assert data.report.split == "file"
    assert data.report.train.num_bytes > 5_000_000
    assert data.report.train.padding < 0.01
    assert data.report.validation is not None
    assert 0.01 < data.report.validation.num_bytes / data.report.train.num_bytes < 0.15
    batch = next(data.train.iterator())
    assert "def " in "".join(data.tokenizer.decode(row) for row in batch["tokens"])
