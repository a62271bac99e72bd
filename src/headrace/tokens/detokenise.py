"""Ids to text piece by piece: characters whose bytes are spread over tokens come when complete.

Each id stands for fixed bytes, so text never depends on how ids are cut into pieces. Which bytes
those are, `pieces` knows.
"""

import codecs
from collections.abc import Iterable

from headrace.tokens.pieces import spelling
from headrace.tokens.tokenizer import TextTokenizer

_SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [{"type": "Metaspace", "replacement": "\u2581"}, {"type": "ByteFallback"}],
}


class TokenBytes:
    """The bytes of each id of one tokenizer, looked up once. Unknown ids have none.

    Total: the entries of a vocabulary whose decoder is not understood are read as SentencePiece
    writes them.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        try:
            self._spell = spelling(tokenizer.decoder)
        except ValueError:
            self._spell = spelling(_SENTENCEPIECE)
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Bytes of one id."""
        known = self._known.get(token)
        if known is None:
            entry = self._tokenizer.vocabulary_entry(token)
            known = self._known[token] = b"" if entry is None else self._spell(entry)
        return known


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
