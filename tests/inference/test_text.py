"""Text comes in whole characters and ends before a stop string, however the tokens fall."""

import pytest

from nha_jax.data.tokenizers import BytesTokenizer
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
