"""Token ids back to text, one id at a time, without the tokenizer's joining rules.

A token of byte-level BPE may be half a character; its bytes are shown as they are, so that what is
printed is exactly what the model read or wrote.
"""

import codecs
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from headrace.errors import UserError
from headrace.observe.units import printable


class Vocabulary:
    """Text of single ids of one tokenizer.

    Args:
        tokenizer: any tokenizer of the `tokenizers` library.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.get_added_tokens_decoder()
        self._byte_of = _byte_level_alphabet()
        # Byte fallback (<0x00> to <0xFF>) is how SentencePiece vocabularies are told apart: their
        # letters are letters, while those of byte-level BPE stand for bytes.
        self._fallback = all(tokenizer.token_to_id(t) is not None for t in ("<0x0A>", "<0xFF>"))

    @classmethod
    def of_run(cls, run_dir: Path) -> "Vocabulary | None":
        """The tokenizer of a run's newest checkpoint; None when it has none.

        Raises:
            UserError: the file is there but cannot be read.
        """
        file = cls.file_of(run_dir)
        if file is None:
            return None
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception for every bad file
            raise UserError(f"{file}: not a readable tokenizer ({error}); restore it") from error

    @staticmethod
    def file_of(run_dir: Path) -> Path | None:
        """The file that `of_run` reads; None when there is none."""
        files = [*run_dir.glob("checkpoints/*/tokenizer.json"), run_dir / "tokenizer.json"]
        files += run_dir.glob("tokenizer/tokenizer.json")
        found = [file for file in files if file.is_file()]
        return max(found, key=lambda file: file.stat().st_mtime, default=None)

    def raw(self, token_id: int) -> bytes:
        """The bytes that the id stands for; a special token's name; b"" for an unknown id."""
        special = self._special.get(token_id)
        if special is not None:
            return special.content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._fallback:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        if all(ch in self._byte_of for ch in token):
            return bytes(self._byte_of[ch] for ch in token)
        return token.encode()

    def text(self, token_id: int) -> str:
        """The id's text on one line: control characters and broken bytes escaped."""
        return printable(self.raw(token_id).decode("utf-8", errors="backslashreplace"))

    def running(self, ids: Iterable[int]) -> list[str]:
        """Texts of consecutive ids that make up the whole when joined, as decoded.

        A character whose bytes span ids appears with the one that completes it; bytes that complete
        none are escaped.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        texts = [decoder.decode(self.raw(token_id)) for token_id in ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def is_special(self, token_id: int) -> bool:
        """Whether the id is matched as a whole, such as a role marker."""
        return token_id in self._special


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes byte b as one printable character; this maps it back.

    Printable Latin-1 bytes stand for themselves; the others take code points from 256 on, in order.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in own}
    rest = [byte for byte in range(256) if byte not in own]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return alphabet
