"""Text of a growing sequence of tokens: whole characters only, and up to a stop string."""

from collections.abc import Sequence

from nha_jax.data.tokenizers import Tokenizer

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no whole character (yet)
# Tokens before the text that are enough for a decoder to know how it begins.
_CONTEXT = 8


class TextStream:
    """Turns tokens into text as they come.

    What is given out never changes later: bytes of a character that is not complete are held back,
    and so is the beginning of what may become a stop string.

    Attributes:
        text: all text so far, up to the stop string if there was one.
        stopped: whether a stop string has come.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, before: Sequence[int] = ()
    ) -> None:
        """An empty stream.

        Args:
            tokenizer: decodes the tokens.
            stop: strings that end the text; they are not part of it.
            before: tokens that come before the text and are no part of it. Some tokenizers write a
                word with a space in front only where something stands before it.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(before)[-_CONTEXT:]
        if tokenizer.decode(self._ids).endswith(_BROKEN):
            self._ids = []  # what completes the character is part of the text
        # Tokens before `_known` are decoded, those from `_context` on give a decoder that joins
        # words its context: only they are decoded again with every new token.
        self._context = 0
        self._known = len(self._ids)
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Takes tokens; returns the text that is certain now and was not before."""
        for token in ids:
            if self.stopped:
                break
            self._ids.append(int(token))
            self._decode(last=False)
        return self._give(0 if self.stopped else self._held_back())

    def finish(self) -> str:
        """Returns what was held back, when no more tokens come."""
        if not self.stopped:
            self._decode(last=True)
        return self._give(0)

    def _decode(self, *, last: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._context : self._known])
        text = self._tokenizer.decode(self._ids[self._context :])
        if len(text) <= len(before) or (text.endswith(_BROKEN) and not last):
            return
        searched = len(self.text)
        self.text += text[len(before) :]
        self._context, self._known = self._known, len(self._ids)
        for stop in self._stop:
            # It may have begun in the text that was there before.
            found = self.text.find(stop, max(0, searched - len(stop) + 1))
            if found >= 0:
                self.text = self.text[:found]
                self.stopped = True

    def _held_back(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _give(self, held_back: int) -> str:
        end = max(self._given, len(self.text) - held_back)
        given, self._given = self.text[self._given : end], end
        return given
