"""The unit of every corpus: a document, where it came from, and which split it belongs to.

Splits go by content, not by position, so that adding a file to a corpus moves no other document
from training to evaluation; exact duplicates are dropped before, so none can be on both sides.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out", "all"]
SPLITS: tuple[Split, ...] = ("train", "held_out", "all")


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus.

    Attributes:
        id: its place in the corpus, e.g. a relative path; unique there.
        text: the whole text, never empty.
        kind: "code" or "prose" or whatever the corpus calls it.
        group: what belongs together, e.g. the package of a file.
        origin: text whose hash decides the split, when it is not the document's own. Documents
            made from one file share it, so that they stay on the same side.
    """

    id: str
    text: str
    kind: str
    group: str
    origin: str = ""


def content_hash(text: str) -> bytes:
    """16 bytes that identify `text`. Lone surrogates are allowed."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def is_held_out(document: Document, fraction: float) -> bool:
    """Whether `document` is among the `fraction` of documents kept from training."""
    key = content_hash(document.origin or document.text)
    return int.from_bytes(key[:8], "big") < fraction * 2.0**64


def without_duplicates(documents: Iterable[Document]) -> Iterator[Document]:
    """Drop empty documents and all but the first of equal texts; the order stays.

    Memory: a hash of 16 bytes per distinct document.
    """
    seen: set[bytes] = set()
    for document in documents:
        if not document.text.strip():
            continue
        key = content_hash(document.text)
        if key not in seen:
            seen.add(key)
            yield document
