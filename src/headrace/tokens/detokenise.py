"""Ids to text piece by piece: characters whose bytes are spread over tokens come when complete.

Each id stands for fixed bytes, so text never depends on how ids are cut into pieces. Covers
byte-level BPE (GPT-2's alphabet), and vocabularies that write spaces as U+2581 and stray bytes as
<0xNN>.
"""

import codecs
import re
from collections.abc import Iterable

from headrace.tokens.tokenizer import TextTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters are their own byte, the other bytes follow from U+0100 on. Source:
    GPT-2's encoder, as all byte-level BPE has it.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


class TokenBytes:
    """The bytes of each id of one tokenizer, looked up once. Unknown ids have none."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.special_ids.values())
        self._byte_level = tokenizer.is_byte_level
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Bytes of one id."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        text = self._tokenizer.vocabulary_entry(token)
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        if self._byte_level:
            try:
                return bytes(_ALPHABET[character] for character in text)
            except KeyError:
                return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        if byte:
            return bytes([int(byte.group(1), 16)])
        return text.replace("\u2581", " ").encode()


class Detokeniser:
    """Text of ids fed bit by bit. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is certain after these ids."""
        return self._decoder.decode(b"".join(map(self._bytes.of, ids)))

    def flush(self) -> str:
        """The text held back; what follows begins a new character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
