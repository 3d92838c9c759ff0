"""Text comes in whole characters and ends before a stop string, however the tokens fall."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from nha_jax.data.tokenizers import BytesTokenizer, HuggingFaceTokenizer
from nha_jax.inference.text import TextStream

BYTES = BytesTokenizer()


def _stream(text: str | bytes, stop=(), size=1):
    """What comes out piece by piece, and the stream."""
    ids = BYTES.encode(text)
    stream = TextStream(BYTES, stop)
    pieces = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_what_was_given_out_is_the_text(size):
    text = "naïve 日本語 🦙 e\u0301\ufffd end"
    pieces, stream = _stream(text, size=size)
    assert "".join(pieces) == stream.text == text
    assert not stream.stopped


def test_a_character_comes_when_it_is_whole():
    pieces, _ = _stream("é🦙")
    assert pieces == ["", "é", "", "", "", "🦙", ""]


def test_broken_bytes_come_when_it_is_certain_and_at_the_end():
    pieces, stream = _stream(b"a\xffb\xe6\x97")
    assert pieces[0] == "a"
    assert "".join(pieces) == stream.text == "a\ufffdb\ufffd"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ("\n\n",), "one"),
        ("aab aaab!", ("aaab",), "aab "),
        ("q日本z", ("本",), "q日"),
        ("xENDy STOP", ("STOP", "END"), "x"),
        ("no stop STO", ("STOP",), "no stop STO"),
        ("STOP", ("STOP",), ""),
    ],
)
def test_text_ends_before_a_stop_string(text, stop, expected, size):
    pieces, stream = _stream(text, stop, size)
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == (text != expected)


def test_the_beginning_of_a_stop_string_is_held_back():
    pieces, _ = _stream("ab-c--d", ("--",))
    assert pieces == ["a", "b", "", "-c", "", "", "", ""]


def test_the_first_word_has_its_space_where_something_stands_before_it(tmp_path: Path) -> None:
    """Llama 2's scheme: the space in front of a text is the tokenizer's own and is stripped."""
    pieces = ["<s>", "</s>", "\u2581", "a", "b", "\u2581a"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [("\u2581", "a")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    found = HuggingFaceTokenizer(str(path))
    prompt, continuation = [found.bos_id, *found.encode("ab a")], found.encode("a b")
    stream = TextStream(found, before=prompt)
    pieces = [stream.push([token]) for token in continuation]
    assert "".join([*pieces, stream.finish()]) == stream.text == " a b"
    at_the_start = TextStream(found, before=[found.bos_id])
    at_the_start.push(continuation)
    assert at_the_start.text == "a b"


def test_a_character_that_began_before_the_text_is_part_of_it() -> None:
    first, *rest = BYTES.encode("日")
    stream = TextStream(BYTES, before=[first])
    assert stream.push([*rest, ord("x")]) == "\ufffd\ufffdx"
