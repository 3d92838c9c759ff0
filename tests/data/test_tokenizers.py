"""Text comes back from its tokens, special tokens are found, and a document cannot forge them."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from nha_jax.data.errors import DataError
from nha_jax.data.pipeline import TextData
from nha_jax.data.tokenizers import BytesTokenizer, HuggingFaceTokenizer, load_tokenizer

OpenText = Callable[..., TextData]
SAMPLE = "def naïve(x):\n    return '𝄞 ' + x  # 日本 </s> <s>\n"


def _byte_level(path: Path, special: list[str], **changes: Any) -> Path:
    """A small byte-level BPE, with what a file may carry from the program that wrote it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE, "the return of the def"] * 20, trainer)
    if "<s>" in special:
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[begin]
        )
    if changes.get("truncate"):
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=4, pad_token=special[0])
    tokenizer.save(str(path))
    return path


def _byte_fallback(path: Path) -> Path:
    """The scheme of Llama 2: U+2581 for spaces, bytes where a character has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "é"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate([*pieces, "▁a", "ab"])},
            merges=[("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path))
    return path


def test_bytes_round_trip() -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(SAMPLE)
    assert ids == list(SAMPLE.encode())
    assert tokenizer.encode(SAMPLE.encode()) == ids
    assert tokenizer.decode([257, *ids, 258, 256]) == SAMPLE
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    np.testing.assert_array_equal(tokenizer.encode_batch([b"", b"\xff\x00"])[1], [255, 0])
    lengths = tokenizer.token_byte_lengths()
    assert lengths.dtype == np.int32
    assert lengths.shape == (259,)
    assert lengths[ids].sum() == len(SAMPLE.encode())
    assert lengths[[256, 257, 258]].sum() == 0


@pytest.mark.parametrize("bad", [-1, 259])
def test_ids_outside_the_vocabulary_are_refused(bad: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"token id {bad} is outside the vocabulary \[0, 259\)"):
        BytesTokenizer().decode([65, bad])
    tokenizer = load_tokenizer(str(_byte_level(tmp_path / "tokenizer.json", ["</s>"])))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tokenizer.decode([tokenizer.vocab_size])


@pytest.mark.parametrize("truncate", [False, True])
def test_a_byte_level_file_round_trips(tmp_path: Path, truncate: bool) -> None:
    path = _byte_level(tmp_path / "tokenizer.json", ["<pad>", "<s>", "</s>"], truncate=truncate)
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    ids = tokenizer.encode(SAMPLE)
    # Neither does the file's template add a token, nor do the ones spelled out in the text count.
    assert not set(ids) & {0, 1, 2}
    assert tokenizer.decode(ids) == SAMPLE
    assert tokenizer.decode([1, *ids, 2]) == SAMPLE
    [batch] = tokenizer.encode_batch([SAMPLE.encode()])
    np.testing.assert_array_equal(batch, ids)
    lengths = tokenizer.token_byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[ids].sum() == len(SAMPLE.encode())
    assert lengths[[0, 1, 2]].sum() == 0


def test_byte_fallback_tokens_count_their_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(_byte_fallback(tmp_path / "tokenizer.json")))
    text = "ab aé日 </s>"
    ids = tokenizer.encode(text)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert 2 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode())


def test_special_tokens_are_found_by_name_by_config_and_by_hand(tmp_path: Path) -> None:
    path = _byte_level(tmp_path / "tokenizer.json", ["<|endoftext|>", "<one>", "<two>"])
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 0, 0)
    config = {"bos_token": {"content": "<one>"}, "eos_token": "<two>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    tokenizer = load_tokenizer(str(path), bos_token="<two>", eos_token="<one>", pad_token="a")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 1)
    assert tokenizer.decode([tokenizer.pad_id]) == ""
    with pytest.raises(DataError, match=r"data\.eos_token: .* has no token '<three>'"):
        load_tokenizer(str(path), eos_token="<three>")


def test_an_end_token_that_is_not_marked_special_cannot_be_forged(tmp_path: Path) -> None:
    path = _byte_level(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eos_id not in tokenizer.encode(SAMPLE)
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere' cannot be read .*valid are 'bytes'"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"broken\.json' is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    path = _byte_level(tmp_path / "tokenizer.json", ["<one>"])
    with pytest.raises(DataError, match=r"set data\.eos_token to one of \['<one>'\]"):
        load_tokenizer(str(path))
    with pytest.raises(DataError, match="the bytes tokenizer has its own"):
        load_tokenizer("bytes", eos_token="x")


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    path = str(_byte_level(tmp_path / "tokenizer.json", ["<s>", "</s>", "<other>"]))
    same = HuggingFaceTokenizer(path).fingerprint
    assert HuggingFaceTokenizer(path).fingerprint == same
    assert HuggingFaceTokenizer(path, eos_token="<other>").fingerprint != same


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match="pip install tokenizers"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="pip install tiktoken"):
        load_tokenizer("tiktoken:gpt2")


class _Encoding:
    """The part of tiktoken's interface that is used: words of one letter, one gap, one special."""

    n_vocab = 259
    eot_token = 258
    special_tokens_set = frozenset({"<|endoftext|>"})

    def encode_single_token(self, token: str) -> int:
        assert token == "<|endoftext|>"
        return 258

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode_ordinary(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def decode_single_token_bytes(self, i: int) -> bytes:
        if i > 255:
            raise KeyError(i)
        return bytes([i])


def test_tiktoken_is_used_through_its_public_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_encoding(name: str) -> _Encoding:
        if name != "letters":
            raise ValueError(f"Unknown encoding {name}.\nPlugins found: []")
        return _Encoding()

    fake = types.ModuleType("tiktoken")
    vars(fake).update(get_encoding=get_encoding, __version__="0")
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    tokenizer = load_tokenizer("tiktoken:letters")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (258, 258, 258)
    ids = tokenizer.encode(SAMPLE)
    assert tokenizer.decode([258, *ids, 258]) == SAMPLE
    np.testing.assert_array_equal(tokenizer.encode_batch([SAMPLE.encode()])[0], ids)
    np.testing.assert_array_equal(tokenizer.token_byte_lengths(), [1] * 256 + [0] * 3)
    with pytest.raises(DataError, match=r"cannot load the encoding 'other' \(Unknown encoding"):
        load_tokenizer("tiktoken:other")
    with pytest.raises(DataError, match=r"data\.bos_token: .* it has \['<|endoftext|>'\]"):
        load_tokenizer("tiktoken:letters", bos_token="<s>")


@pytest.fixture
def half_broken(tmp_path: Path) -> Path:
    """Twenty files, two of which are not UTF-8."""
    folder = tmp_path / "half"
    folder.mkdir()
    for i in range(20):
        text = f"the return of number {i} ".encode() * 5
        (folder / f"{i:02}.txt").write_bytes(text + (b"\xff" if i in (3, 4) else b""))
    return folder


def test_text_that_is_not_utf8_is_skipped_replaced_or_refused(
    open_text: OpenText, half_broken: Path, tmp_path: Path
) -> None:
    path = str(_byte_level(tmp_path / "tokenizer.json", ["<s>", "</s>"]))

    def open_(**changes: Any) -> TextData:
        return open_text(half_broken, tokenizer=path, vocab_size=400, **changes)

    report = open_().report
    assert report.read.bad_records == 2
    assert report.train.documents == 17
    assert report.read.bad_record_messages[0].endswith("03.txt: the text is not UTF-8 (byte 115)")
    with pytest.raises(DataError, match=r"04\.txt: .*max_bad_records=1"):
        open_(max_bad_records=1)
    report = open_(invalid_utf8="replace").report
    assert report.read.bad_records == 0
    assert report.read.replaced_utf8 == 2
    assert report.train.documents == 19
    assert "repaired: invalid UTF-8 in 2 documents" in str(report)
    with pytest.raises(DataError, match=r"03\.txt: .* set data\.invalid_utf8"):
        open_(invalid_utf8="error")


def test_documents_of_a_trained_tokenizer_come_back(
    open_text: OpenText, half_broken: Path, tmp_path: Path
) -> None:
    path = str(_byte_level(tmp_path / "tokenizer.json", ["<s>", "</s>"]))
    data = open_text(half_broken, tokenizer=path, vocab_size=400, sequence_length=256, batch_size=1)
    iterator = data.train.iterator()
    texts = set()
    for _ in range(data.train.num_rows_per_epoch):
        batch = next(iterator)
        for i in range(1, batch["segment_ids"].max() + 1):
            here = batch["segment_ids"] == i
            assert batch["tokens"][here][0] == data.tokenizer.bos_id
            assert batch["targets"][here][-1] == data.tokenizer.eos_id
            texts.add(data.tokenizer.decode(batch["tokens"][here]))
    assert len(texts) == 17
    assert texts <= {f"the return of number {i} " * 5 for i in range(20)}
    with pytest.raises(DataError, match="outside the model's vocabulary"):
        open_text(half_broken, tokenizer=path, vocab_size=data.tokenizer.vocab_size - 1)
