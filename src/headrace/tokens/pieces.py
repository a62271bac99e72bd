"""What tokens spell, in bytes, read from their tokenizer's decoder.

The concatenation of tokens' bytes is what decoding them gives, special tokens included; only the
blank that some decoders take off the very beginning of a text stays. Decoders are read, not run:
no text can be decoded token by token, since one character's bytes may lie in several tokens.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.errors import UserError

_MAX_IDS = 1 << 24
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_Step = Callable[[str | bytes], str | bytes]


def spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """What an entry of a vocabulary spells.

    Byte-level vocabularies are understood (GPT-2, GLM, Llama 3, Qwen, SmolLM2) and those in the
    manner of SentencePiece (Llama 2, Mistral, Gemma).

    Args:
        decoder: as in tokenizer.json.

    Raises:
        ValueError: another kind of decoder.
    """
    steps = list(_steps(decoder))

    def spell(entry: str) -> bytes:
        spelled: str | bytes = entry
        for step in steps:
            spelled = step(spelled)
        return spelled if isinstance(spelled, bytes) else spelled.encode()

    return spell


def token_pieces(folder: str | Path) -> list[bytes]:
    """Bytes of every id, empty for ids that no token has; added and special tokens included.

    Args:
        folder: directory with tokenizer.json.

    Raises:
        UserError: no such file, one that is no tokenizer, or another kind of decoder.
    """
    with _reading(folder) as spec:
        tokens = dict(_tokens(spec))
        spell = spelling(spec.get("decoder"))
    pieces = [b""] * (max(tokens, default=-1) + 1)
    for token_id, text in tokens.items():
        pieces[token_id] = spell(text)
    return pieces


def tag_ids(folder: str | Path) -> frozenset[int]:
    """Ids of added tokens, which no text is encoded to: they shape a conversation.

    Args, Raises: as `token_pieces`.
    """
    with _reading(folder) as spec:
        return frozenset(token["id"] for token in spec.get("added_tokens") or ())


@contextlib.contextmanager
def _reading(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The tokenizer's file, while it is read; what it does not say is the user's to mend."""
    file = Path(folder) / "tokenizer.json"
    try:
        yield json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"tokenizer {str(file)!r}: cannot be read ({error.strerror}); give a directory with "
            "tokenizer.json"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"tokenizer {str(file)!r}: what its tokens spell cannot be told ({error}); use a "
            "tokenizer that is byte-level or in the manner of SentencePiece"
        ) from error


def _tokens(spec: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """(id, text) of the vocabulary, then of added tokens, which come first for whoever decodes."""
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):
        pairs = [(token_id, text) for text, token_id in vocabulary.items()]
    else:
        pairs = [(token_id, entry[0]) for token_id, entry in enumerate(vocabulary)]
    pairs += [(token["id"], token["content"]) for token in spec.get("added_tokens") or ()]
    for token_id, text in pairs:
        if not isinstance(token_id, int) or not 0 <= token_id < _MAX_IDS:
            raise ValueError(f"token {text!r} has the id {token_id!r}")
        yield token_id, text


def _steps(decoder: dict[str, Any] | None) -> Iterator[_Step]:
    """What a decoder does to each token."""
    kind = None if decoder is None else decoder["type"]
    match kind:
        case "Sequence":
            assert decoder is not None
            parts = decoder["decoders"]
            fused = [part["type"] for part in parts].index("Fuse") if _fuses(parts) else len(parts)
            for number, part in enumerate(parts):
                # Behind the fusion the text's ends are meant, not the tokens'.
                if part["type"] == "Strip" and number > fused:
                    continue
                yield from _steps(part)
        case "ByteLevel":
            yield _from_byte_level
        case "Metaspace":
            assert decoder is not None
            yield _replacement(decoder["replacement"], " ")
        case "Replace":
            assert decoder is not None
            if "String" not in decoder["pattern"]:
                raise ValueError(f"its decoder replaces {decoder['pattern']}")
            yield _replacement(decoder["pattern"]["String"], decoder["content"])
        case "ByteFallback":
            yield _from_byte_token
        case "Fuse":
            return
        case _:
            raise ValueError(f"its decoder is {kind}")


def _fuses(parts: list[dict[str, Any]]) -> bool:
    return any(part["type"] == "Fuse" for part in parts)


def _replacement(old: str, new: str) -> _Step:
    def replace(token: str | bytes) -> str | bytes:
        return token.replace(old, new) if isinstance(token, str) else token

    return replace


def _from_byte_token(token: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token) if isinstance(token, str) else None
    return token if match is None else bytes([int(match[1], 16)])


def _from_byte_level(token: str | bytes) -> str | bytes:
    """A token of characters that all stand for bytes is those bytes; any other is itself."""
    if isinstance(token, bytes):
        return token
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token


def _byte_alphabet() -> dict[str, int]:
    """Bytes by the characters that stand for them.

    Source: byte-level BPE (Radford et al. 2019): printable characters of Latin-1 are themselves,
    the other bytes are the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
