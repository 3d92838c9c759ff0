"""Every format is read right, and bad input ends in one clear sentence or in a counted skip."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python import array_record_module

from nha_jax.data.config import DataConfig
from nha_jax.data.errors import DataError
from nha_jax.data.pipeline import TextData
from nha_jax.data.sources import BadRecord, Document, SourceFile, find_files, read_documents

OpenText = Callable[..., TextData]
TEXTS = [f"text number {i} of {'x' * i}é" for i in range(40)]


def _write_jsonl(path: Path, records: list[Any]) -> None:
    lines = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in records]
    path.write_bytes(b"\n".join(lines) + b"\n")


def _write_array_record(path: Path, records: list[bytes]) -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def _write(path: Path, kind: str, texts: list[str]) -> None:
    if kind == "jsonl":
        _write_jsonl(path, [{"id": i, "text": text} for i, text in enumerate(texts)])
    elif kind == "parquet":
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path)
    else:
        _write_array_record(path, [text.encode() for text in texts])


def _all_texts(data: TextData) -> list[str]:
    """The documents of both sides, where each fits in a row."""
    found = []
    for split, batches in ((data.train, data.train.num_rows_per_epoch), (data.validation, None)):
        assert split is not None
        iterator = split.iterator()
        for _ in range(split.num_batches_per_epoch if batches is None else batches):
            batch = next(iterator)
            for row in range(len(batch["tokens"])):
                for i in range(1, batch["segment_ids"][row].max() + 1):
                    here = batch["segment_ids"][row] == i
                    found.append(data.tokenizer.decode(batch["tokens"][row][here]))
    return found


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("jsonl", ".jsonl"), ("parquet", ".parquet"), ("arrayrecord", ".array_record")],
)
def test_record_formats_hold_the_same_documents(
    open_text: OpenText, tmp_path: Path, kind: str, suffix: str
) -> None:
    path = tmp_path / f"corpus{suffix}"
    _write(path, kind, TEXTS)
    data = open_text(path, sequence_length=128, batch_size=1)
    assert data.report.split == "record"
    assert data.report.validation is not None
    assert data.report.validation.documents == 2
    assert sorted(_all_texts(data)) == sorted(TEXTS)


def test_files_are_split_as_a_whole(open_text: OpenText, tmp_path: Path) -> None:
    for i in range(10):
        texts = TEXTS[4 * i : 4 * i + 4]
        kind, suffix = [("jsonl", ".jsonl"), ("parquet", ".parquet")][i % 2]
        _write(tmp_path / f"part{i}{suffix}", kind, texts)
    data = open_text(tmp_path, sequence_length=128, batch_size=1, validation_fraction=0.2)
    assert data.report.split == "file"
    assert data.validation is not None
    held_out = {
        data.tokenizer.decode(row[ids == i])
        for batch in data.validation.iterator()
        for row, ids in zip(batch["tokens"], batch["segment_ids"], strict=True)
        for i in range(1, ids.max() + 1)
    }
    groups = [set(TEXTS[4 * i : 4 * i + 4]) for i in range(10)]
    assert sum(group <= held_out for group in groups) == 2
    assert len(held_out) == 8
    by_record = open_text(tmp_path, sequence_length=128, batch_size=1, split_by="record")
    assert by_record.report.split == "record"


def test_a_single_text_file_is_cut_at_a_line_end(open_text: OpenText, tmp_path: Path) -> None:
    lines = [f"line {i}\n" for i in range(400)]
    (tmp_path / "book.txt").write_text("".join(lines))
    data = open_text(tmp_path / "book.txt", sequence_length=2048, batch_size=1)
    assert data.report.split == "cut"
    assert data.validation is not None
    [batch] = list(data.validation.iterator())
    text = data.tokenizer.decode(batch["tokens"][0][batch["segment_ids"][0] == 1])
    assert text.startswith("line ")
    assert "".join(lines).endswith(text)
    assert len(text) == pytest.approx(0.05 * sum(map(len, lines)), abs=10)


def test_a_cut_never_falls_inside_a_character(open_text: OpenText, tmp_path: Path) -> None:
    for length in range(200, 204):
        path = tmp_path / f"{length}.txt"
        path.write_bytes(b"x" * (length % 4) + "𝄞".encode() * length)
        data = open_text(path, sequence_length=32, batch_size=1)
        assert data.report.validation is not None
        assert data.report.validation.num_bytes % 4 == 0
        assert 0 < data.report.validation.num_bytes < 100


def test_validation_may_have_its_own_source(open_text: OpenText, tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", "jsonl", TEXTS)
    _write(tmp_path / "valid.parquet", "parquet", [*TEXTS[:3], "only here"])
    data = open_text(
        tmp_path / "train.jsonl",
        validation_source=str(tmp_path / "valid.parquet"),
        sequence_length=128,
    )
    assert data.report.split == "source"
    assert data.report.in_validation == 3
    assert data.report.train.documents == 37
    assert data.report.validation is not None
    assert data.report.validation.documents == 4


def test_no_validation_is_asked_for_by_zero(open_text: OpenText, corpus: Path) -> None:
    data = open_text(corpus, validation_fraction=0)
    assert data.validation is None
    assert data.report.train.documents == 60
    assert "no validation" in str(data.report)


def test_equal_files_are_on_one_side_also_without_deduplication(
    open_text: OpenText, tmp_path: Path
) -> None:
    for i, text in enumerate(TEXTS):
        for copy in "ab":
            (tmp_path / f"{i}{copy}.txt").write_text(text)
    data = open_text(tmp_path, deduplicate=False, validation_fraction=0.25)
    assert data.report.duplicates == data.report.in_validation == 0
    assert data.report.validation is not None
    assert (data.report.train.documents, data.report.validation.documents) == (60, 20)
    assert open_text(tmp_path, validation_fraction=0.25).report.duplicates == 40


def test_names_of_files_do_not_move_them_to_the_other_side(
    open_text: OpenText, tmp_path: Path
) -> None:
    reports = []
    for folder, names in (("one", range(40)), ("two", reversed(range(40)))):
        (tmp_path / folder).mkdir()
        for name, text in zip(names, TEXTS, strict=True):
            (tmp_path / folder / f"{name:02}.txt").write_text(text)
        reports.append(open_text(tmp_path / folder).report)
    assert reports[0].validation == reports[1].validation


def test_folders_globs_and_tuples_find_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.TXT", "deep/er/d.jsonl", ".hidden/e.txt", "f.md"):
        (tmp_path / name).write_text("{}")
    root = str(tmp_path)
    expected = [f"{root}/{n}" for n in ("a.txt", "b.txt", "deep/c.TXT", "deep/er/d.jsonl")]
    files, ignored = find_files(root, None)
    assert [file.path for file in files] == expected
    assert [file.format for file in files] == ["txt", "txt", "txt", "jsonl"]
    assert ignored == 1
    files, ignored = find_files((f"{root}/*.txt", f"{root}/deep", root), None)
    assert [file.path for file in files] == expected
    assert ignored == 5
    files, _ = find_files(f"{root}/**/*.md", "txt")
    assert [(file.path, file.format) for file in files] == [(f"{root}/f.md", "txt")]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "a[1].txt"
    path.write_text("text")
    assert find_files(str(path), None)[0] == [SourceFile(str(path), "txt")]


def test_the_standard_library_comes_without_tests_and_packages() -> None:
    files, _ = find_files("stdlib", None)
    names = [file.path for file in files]
    assert names == sorted(names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    parts = {part for name in names for part in Path(name).parts}
    assert not parts & {"test", "tests", "site-packages", "dist-packages"}


def test_an_unreadable_file_of_the_standard_library_is_skipped_and_counted(
    open_text: OpenText, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus / "gone.txt").symlink_to(corpus / "nowhere")
    paths = sorted(str(path) for path in corpus.iterdir())
    monkeypatch.setattr("nha_jax.data.sources._stdlib_files", lambda: paths)
    report = open_text("stdlib").report
    assert report.read.unreadable_files == 1
    assert report.read.files == 60
    assert "1 unreadable files" in str(report)
    with pytest.raises(DataError, match=r"gone\.txt' cannot be read"):
        open_text(corpus)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", r"data\.source: there is no file or folder '.*nowhere\.txt'"),
        ("*.nothing", r"the pattern '.*' matches no file"),
        ("empty_folder", r"has no file that ends in \.array_record or"),
        ("notes.md", r"the format of '.*notes\.md' cannot be told from its name"),
        ("empty.txt", r"the corpus is empty: 1 files with 1 empty documents"),
        ("blank.jsonl", r"the corpus is empty: 1 files with 0 empty documents"),
        ("one.jsonl", r"single document, which cannot be split"),
    ],
)
def test_sources_without_text_are_refused(
    open_text: OpenText, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "notes.md").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n  \n")
    _write_jsonl(tmp_path / "one.jsonl", [{"text": "a" * 100}])
    with pytest.raises(DataError, match=message):
        open_text(tmp_path / source)


def test_a_missing_validation_source_is_named(open_text: OpenText, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"data\.validation_source: there is no file"):
        open_text(corpus, validation_source="nowhere")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut off', "the line is not JSON"),
        (b'{"text": "\xff"}', r"the line is not UTF-8 \(byte 10\)"),
        (b"[1, 2]", "a JSON list, where an object must be"),
        (b'"text"', "a JSON str"),
        (b'{"body": "x", "id": 3}', r"no field 'text'; the fields are 'body', 'id'"),
        (b'{"text": 5}', "is a int, where text must be"),
        (b'{"text": null}', "is a NoneType"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b"[" * 100_000, "the line is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "the line is not JSON"),
    ],
)
def test_a_broken_json_line_is_named_and_skipped_up_to_the_limit(
    open_text: OpenText, tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    good: list[Any] = [{"text": text} for text in TEXTS]
    _write_jsonl(path, [*good[:4], line, *good[4:]])
    with pytest.raises(DataError, match=rf"corpus\.jsonl:5: .*{reason}.*max_bad_records=0"):
        open_text(path, max_bad_records=0)
    report = open_text(path, max_bad_records=1).report
    assert report.read.bad_records == 1
    assert report.train.documents == 38
    assert f"{path}:5: " in str(report)
    # What was accepted once is refused from the cache by a stricter limit.
    with pytest.raises(DataError, match=r"corpus\.jsonl:5: "):
        open_text(path, max_bad_records=0)


def test_a_wrong_field_name_is_told_by_the_first_records(
    open_text: OpenText, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.jsonl"
    _write_jsonl(path, [{"content": text} for text in TEXTS[:5]])
    with pytest.raises(DataError, match=r"corpus is empty.*no field 'text'; .*'content'"):
        open_text(path)
    assert open_text(path, text_field="content", sequence_length=16).report.train.documents == 4


def test_json_lines_may_have_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two\xe2\x80\xa8"}\r\n')
    read = list(read_documents(SourceFile(str(path), "jsonl"), "text"))
    assert [item.data for item in read if isinstance(item, Document)] == [
        b"one",
        "two\N{LINE SEPARATOR}".encode(),
    ]


def test_a_missing_parquet_column_lists_the_columns(open_text: OpenText, tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", "parquet", TEXTS)
    with pytest.raises(DataError, match=r"no column 'body' .*columns are \['id', 'text'\]"):
        open_text(tmp_path / "a.parquet", text_field="body")
    with pytest.raises(DataError, match=r"column 'id' .* is int64, where text must be"):
        open_text(tmp_path / "a.parquet", text_field="id")


def test_parquet_kinds_of_text_and_nulls(tmp_path: Path) -> None:
    values = ["one", None, "two"]
    for i, kind in enumerate((pa.string(), pa.large_string(), pa.binary(), None)):
        column = pa.array(values).dictionary_encode() if kind is None else pa.array(values, kind)
        path = tmp_path / f"{i}.parquet"
        pq.write_table(pa.table({"text": column}), path, row_group_size=2)
        read = list(read_documents(SourceFile(str(path), "parquet"), "text"))
        assert read[0] == Document(b"one", f"{path}: row 0")
        assert read[1] == BadRecord(f"{path}: row 1", "the column 'text' is null")
        assert read[2] == Document(b"two", f"{path}: row 2")


@pytest.mark.parametrize("suffix", [".parquet", ".array_record"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_file_is_named(
    open_text: OpenText, tmp_path: Path, suffix: str, damage: str
) -> None:
    path = tmp_path / f"a{suffix}"
    _write(path, "parquet" if suffix == ".parquet" else "arrayrecord", TEXTS)
    content = path.read_bytes()
    path.write_bytes(
        {"cut": content[: len(content) // 2], "empty": b"", "other": b"text" * 50_000}[damage]
    )
    with pytest.raises(DataError, match=rf"a\{suffix}'"):
        open_text(path)


def test_bytes_that_are_not_utf8_are_text_for_the_bytes_tokenizer(
    open_text: OpenText, tmp_path: Path
) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(b"\xff\x00\x80" * (i + 10))
    data = open_text(tmp_path)
    assert data.report.read.bad_records == 0
    assert np.isin(next(data.train.iterator())["tokens"], [0xFF, 0, 0x80, 256, 257]).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("source", ()),
        ("source", ("a", 3)),
        ("validation_source", ""),
        ("format", "csv"),
        ("text_field", ""),
        ("tokenizer", 7),
        ("bos_token", ""),
        ("sequence_length", 0),
        ("sequence_length", 2.0),
        ("batch_size", -1),
        ("batch_size", True),
        ("packing", 1),
        ("seed", -1),
        ("seed", 2**32),
        ("num_workers", -1),
        ("prefetch", 0),
        ("validation_fraction", 1.0),
        ("validation_fraction", "0.1"),
        ("validation_fraction", float("nan")),
        ("split_by", "line"),
        ("max_bad_records", -1),
        ("invalid_utf8", "ignore"),
        ("cache_dir", ""),
    ],
)
def test_a_wrong_field_of_the_configuration_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"data\.{field} must be .*got"):
        DataConfig(**{field: value})  # type: ignore[arg-type]
