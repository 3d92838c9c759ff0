"""Text to token ids and back: bytes, Hugging Face `tokenizer.json` files, and tiktoken.

Whatever the tokenizer, what stands in a document is text: a document that contains the characters
`</s>` does not get the end-of-sequence token from them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nha_jax.data.config import TIKTOKEN_PREFIX
from nha_jax.data.errors import DataError

# Names under which tokenizers keep their special tokens, most specific first.
_BOS_NAMES = (
    "<s>", "<bos>", "[BOS]", "<|bos|>", "<|begin_of_text|>", "<|startoftext|>",
    "<｜begin▁of▁sentence｜>", "[CLS]", "<|endoftext|>",  # noqa: RUF001
)  # fmt: skip
_EOS_NAMES = (
    "</s>", "<eos>", "[EOS]", "<|eos|>", "<|end_of_text|>", "<|endoftext|>",
    "<｜end▁of▁sentence｜>", "<|eot_id|>", "<|im_end|>", "[SEP]",  # noqa: RUF001
)  # fmt: skip
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")


class Tokenizer(Protocol):
    """What the pipeline, generation and evaluation need of a tokenizer.

    Attributes:
        vocab_size: One more than the largest id, special tokens included.
        pad_id, bos_id, eos_id: Ids of the special tokens; two of them may be the same.
        takes_bytes: True where any bytes can be encoded, False where they must be UTF-8.
        fingerprint: Text that differs between tokenizers that encode differently.
    """

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    takes_bytes: bool
    fingerprint: str

    def encode(self, text: str | bytes) -> list[int]:
        """Token ids of `text`, without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each of `texts` (UTF-8 unless `takes_bytes`), without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens left out and broken UTF-8 replaced by U+FFFD."""
        ...

    def token_byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: how many bytes each token decodes to; 0 for special tokens."""
        ...


class BytesTokenizer:
    """Bytes 0 to 255 as themselves, then PAD = 256, BOS = 257, EOS = 258."""

    vocab_size = 259
    pad_id = 256
    bos_id = 257
    eos_id = 258
    takes_bytes = True
    fingerprint = "bytes"

    def encode(self, text: str | bytes) -> list[int]:
        """Bytes of `text`, of a `str` those of its UTF-8."""
        return list(text.encode("utf-8") if isinstance(text, str) else text)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """uint8 array per text."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids below 256.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        ids = _checked_ids(ids, self.vocab_size)
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_byte_lengths(self) -> np.ndarray:
        """int32 [259]: 256 ones and three zeros."""
        return np.array([1] * 256 + [0] * 3, np.int32)


class HuggingFaceTokenizer:
    """A `tokenizer.json` through the `tokenizers` library, its special tokens found by themselves.

    Each special token is the one given by name or else the one that a `tokenizer_config.json`
    beside the file names, or else the file's first added token with a customary name. Without a
    begin-of-sequence token the end-of-sequence token stands in for it, as in GPT-2; so it does
    for padding, whose id is never read.

    Args:
        path: The `tokenizer.json`, or the folder that holds it.
        bos_token, eos_token, pad_token: Special tokens by name, or None.

    Raises:
        DataError: The library or the file is missing, the file is broken, or there is no
            end-of-sequence token.
    """

    takes_bytes = False

    def __init__(
        self,
        path: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"The tokenizer {path!r} needs the package tokenizers, which is not installed: "
                "`pip install tokenizers`."
            ) from error
        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        path = str(file)
        content = _read_file(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            self._json: dict[str, Any] = json.loads(content)
        except Exception as error:  # The library raises plain Exception.
            raise DataError(f"{path!r} is not a tokenizer.json ({error}).") from error
        # A file may carry the truncation and padding of the program that wrote it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Special tokens that are spelled out in a document stay text.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{path!r} has an empty vocabulary.")
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        named = _named_special_tokens(file.parent)

        def find(kind: str, given: str | None, names: tuple[str, ...]) -> int | None:
            if given is not None:
                if given not in vocabulary:
                    raise DataError(f"data.{kind}: {path!r} has no token {given!r}.")
                return vocabulary[given]
            known = {content: i for i, content in self._added.items()}
            candidates = (named.get(kind), *names)
            return next((known[name] for name in candidates if name in known), None)

        eos = find("eos_token", eos_token, _EOS_NAMES)
        if eos is None:
            raise DataError(
                f"{path!r} has no added token that is known as end of sequence; set data.eos_token "
                f"to one of {sorted(self._added.values())[:20]} or another of its tokens."
            )
        bos = find("bos_token", bos_token, _BOS_NAMES)
        pad = find("pad_token", pad_token, _PAD_NAMES)
        self.eos_id = eos
        self.bos_id = eos if bos is None else bos
        self.pad_id = eos if pad is None else pad
        self._special_ids |= {self.eos_id, self.bos_id, self.pad_id}
        # So that one which the file does not mark as special stays text in a document, too.
        self._tokenizer.add_special_tokens(
            [self._added[i] for i in sorted(self._special_ids) if i in self._added]
        )
        self.fingerprint = _fingerprint("hf", tokenizers.__version__, content, self)

    def encode(self, text: str | bytes) -> list[int]:
        """Token ids of `text`.

        Raises:
            UnicodeDecodeError: `text` is bytes that are not UTF-8.
        """
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """int32 array per text; several cores work at it."""
        decoded = [text.decode("utf-8") for text in texts]
        encoded = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(item.ids, np.int32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        kept = [i for i in _checked_ids(ids, self.vocab_size) if i not in self._special_ids]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def token_byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size], from the spelling of the tokens.

        Exact for byte-level tokens (each character stands for one byte), for `<0xNN>` byte tokens
        and where `▁` stands for a space; other schemes count the UTF-8 of the token's spelling
        without a `##` in front.
        """
        byte_level = "ByteLevel" in _component_types(
            self._json.get("decoder"), self._json.get("pre_tokenizer")
        )
        byte_fallback = bool((self._json.get("model") or {}).get("byte_fallback"))
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in self._special_ids:
                continue
            if i in self._added:
                lengths[i] = len(self._added[i].encode("utf-8"))
            elif byte_level:
                lengths[i] = len(token)
            elif byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
                lengths[i] = 1
            else:
                spelling = token.replace("▁", " ").removeprefix("##")
                lengths[i] = len(spelling.encode("utf-8"))
        return lengths


class TiktokenTokenizer:
    """An encoding of the `tiktoken` library; `<|endoftext|>` begins, ends and pads by default.

    Args:
        name: Name of the encoding, `"cl100k_base"` for one. tiktoken fetches its file on first use.
        bos_token, eos_token, pad_token: Special tokens of the encoding by name, or None.

    Raises:
        DataError: The library is missing, or has no such encoding, or cannot load it.
    """

    takes_bytes = False

    def __init__(
        self,
        name: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise DataError(
                f"The tokenizer {TIKTOKEN_PREFIX + name!r} needs the package tiktoken, which is "
                "not installed: `pip install tiktoken`."
            ) from error
        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:  # Unknown names are ValueError, downloads raise anything.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(f"tiktoken cannot load the encoding {name!r} ({reason}).") from error
        self.vocab_size = int(self._encoding.n_vocab)

        def find(kind: str, given: str | None) -> int:
            if given is None:
                return int(self._encoding.eot_token)
            if given not in self._encoding.special_tokens_set:
                raise DataError(
                    f"data.{kind}: the tiktoken encoding {name!r} has no special token {given!r}; "
                    f"it has {sorted(self._encoding.special_tokens_set)}."
                )
            return int(self._encoding.encode_single_token(given))

        self.bos_id = find("bos_token", bos_token)
        self.eos_id = find("eos_token", eos_token)
        self.pad_id = find("pad_token", pad_token)
        self._special_ids = frozenset(
            self._encoding.encode_single_token(token) for token in self._encoding.special_tokens_set
        )
        self.fingerprint = _fingerprint("tiktoken", tiktoken.__version__, name.encode(), self)

    def encode(self, text: str | bytes) -> list[int]:
        """Token ids of `text`.

        Raises:
            UnicodeDecodeError: `text` is bytes that are not UTF-8.
        """
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return list(self._encoding.encode_ordinary(text))

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """int32 array per text."""
        encoded = self._encoding.encode_ordinary_batch([text.decode("utf-8") for text in texts])
        return [np.asarray(ids, np.int32) for ids in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        kept = [i for i in _checked_ids(ids, self.vocab_size) if i not in self._special_ids]
        return str(self._encoding.decode(kept))

    def token_byte_lengths(self) -> np.ndarray:
        """int32 [vocab_size]; 0 also for ids that the encoding leaves free."""
        lengths = np.zeros(self.vocab_size, np.int32)
        for i in range(self.vocab_size):
            if i in self._special_ids:
                continue
            try:
                lengths[i] = len(self._encoding.decode_single_token_bytes(i))
            except KeyError:
                continue
        return lengths


def load_tokenizer(
    name: str,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
) -> Tokenizer:
    """Makes the tokenizer that `DataConfig.tokenizer` names.

    Args:
        name: `"bytes"`, `"tiktoken:NAME"`, or the path of a `tokenizer.json` or its folder.
        bos_token: Begin-of-sequence token by name, or None to find it.
        eos_token: End-of-sequence token by name, or None to find it.
        pad_token: Padding token by name, or None to find it.

    Returns:
        The tokenizer.

    Raises:
        DataError: It cannot be made; the message says what is missing.
    """
    tokens = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
    if name == "bytes":
        given = [kind for kind, token in tokens.items() if token is not None]
        if given:
            raise DataError(f"data.{given[0]} cannot be set: the bytes tokenizer has its own.")
        return BytesTokenizer()
    if name.startswith(TIKTOKEN_PREFIX):
        return TiktokenTokenizer(name.removeprefix(TIKTOKEN_PREFIX), **tokens)
    return HuggingFaceTokenizer(name, **tokens)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer: {str(path)!r} cannot be read ({error.strerror}); valid are 'bytes', "
            f"the path of a tokenizer.json, and '{TIKTOKEN_PREFIX}NAME'."
        ) from error


def _named_special_tokens(folder: Path) -> dict[str, str]:
    """Names of special tokens in a readable `tokenizer_config.json` of the folder, if any."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    names = {}
    for kind in ("bos_token", "eos_token", "pad_token"):
        token = config.get(kind) if isinstance(config, dict) else None
        # A plain string, or an object that describes the token.
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[kind] = token
    return names


def _component_types(*components: Any) -> set[str]:
    """The `type` of each component of a tokenizer.json and of those nested in it."""
    types = set()
    for component in components:
        if isinstance(component, dict):
            types.add(component.get("type", ""))
            for key in ("decoders", "pretokenizers"):
                types |= _component_types(*component.get(key, ()))
    return types


def _checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise ValueError(f"The token id {i} is outside the vocabulary [0, {vocab_size}).")
    return checked


def _fingerprint(
    kind: str, version: str, content: bytes, tokenizer: "HuggingFaceTokenizer | TiktokenTokenizer"
) -> str:
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"{kind}-{version}-{digest}-{tokenizer.bos_id}-{tokenizer.eos_id}-{tokenizer.pad_id}"
