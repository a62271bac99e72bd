"""Corpora: where text comes from, in a fixed order, without duplicates, with a held-out split.

`open_corpus` takes a word ("builtin", "system"), a path, or a `CorpusSpec`, and finds the reader.
A corpus is read again from the start by every call of `documents`; nothing is kept in memory but a
hash per document.
"""

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace.data.documents import SPLITS, Document, Split, is_held_out, without_duplicates
from headrace.data.readers import (
    Fields,
    Reader,
    file_reader,
    folder_reader,
    saved_dataset_reader,
)
from headrace.errors import UserError

DEFAULT_GLOBS = (
    "*.txt", "*.md", "*.rst", "*.py", "*.c", "*.h", "*.cpp", "*.js", "*.ts", "*.go", "*.rs",
    "*.java", "*.sh", "*.jsonl", "*.jsonl.gz", "*.parquet",
)  # fmt: skip

_READING = 1
"""Raised whenever the same files give other documents, so that no stale token cache is used."""


@dataclass(frozen=True)
class CorpusSpec:
    """A corpus as a recipe names it.

    Attributes:
        source: "builtin" (standard library of the running interpreter), "system" (documentation of
            this machine), or a path: a folder of files, a .jsonl[.gz], .parquet, .arrow or text
            file, or a dataset that Hugging Face `datasets` saved to disk.
        globs: files of a folder; without a slash by name at any depth, else by relative path.
        text_field: column of the text in JSONL, Parquet and Arrow.
        group_field: column of the group there; None: the folder.
        kind: kind of all documents; None: by what they are.
        held_out: share of documents kept from training, chosen by content, 0 <= held_out < 1.
    """

    source: str
    globs: tuple[str, ...] = DEFAULT_GLOBS
    text_field: str = "text"
    group_field: str | None = None
    kind: str | None = None
    held_out: float = 0.03

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise UserError(f"corpus held_out = {self.held_out}: must be at least 0 and below 1")


class Corpus:
    """Documents of one source. Made by `open_corpus`.

    Attributes:
        spec: what was asked for.
    """

    def __init__(self, spec: CorpusSpec, reader: Reader) -> None:
        self.spec = spec
        self._reader = reader

    def documents(self, split: Split = "train") -> Iterator[Document]:
        """Documents of one split, in the same order every time.

        Raises:
            UserError: unknown split, or a file that cannot be read.
        """
        if split not in SPLITS:
            raise UserError(f"corpus split {split!r}: use one of {', '.join(SPLITS)}")
        for document in without_duplicates(self._reader.read()):
            if split == "all" or is_held_out(document, self.spec.held_out) == (split == "held_out"):
                yield document

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that decides which documents there are: the files' bytes and the spec."""
        digest = hashlib.blake2b(digest_size=16)
        spec = self.spec
        known = (spec.text_field, spec.group_field, spec.kind, spec.held_out)
        digest.update(repr((_READING, known)).encode())
        for name, path in self._reader.files:
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "blake2b").digest()
            except OSError as error:
                raise UserError(
                    f"corpus file {str(path)!r}: cannot be read ({error}); mend or remove it"
                ) from error
            digest.update(f"{name}\0".encode("utf-8", "surrogateescape") + content)
        return digest.hexdigest()


def open_corpus(spec: str | Path | CorpusSpec) -> Corpus:
    """The corpus that `spec` names; a string or path is its `source`.

    Raises:
        UserError: there is nothing at the source, or nothing in it matches.
    """
    if not isinstance(spec, CorpusSpec):
        spec = CorpusSpec(str(spec))
    return Corpus(spec, _reader(spec))


def _reader(spec: CorpusSpec) -> Reader:
    from headrace.data import builtin

    if spec.source == "builtin":
        return builtin.standard_library_reader()
    if spec.source == "system":
        return builtin.system_reader()
    path = Path(spec.source).expanduser()
    fields = Fields(spec.text_field, spec.group_field, spec.kind)
    if path.is_file():
        return file_reader(path, fields)
    if not path.is_dir():
        raise UserError(
            f"corpus source {spec.source!r}: no such file or folder; "
            "give a path, or 'builtin' or 'system'"
        )
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return saved_dataset_reader(path, fields)
    return folder_reader(path, spec.globs, fields)


def sample_texts(
    corpus: Corpus, max_bytes: int = 3 << 20, document_bytes: int = 1 << 15
) -> list[str]:
    """Training texts for a tokenizer: a fixed random choice of the corpus's train split.

    Args:
        corpus: where to choose from.
        max_bytes: UTF-8 bytes to choose, about.
        document_bytes: characters of one document at most, so that no single one dominates.

    Returns:
        Texts in the order of their hashes. Equal corpora give equal samples.
    """
    # A heap of the smallest hashes keeps memory at max_bytes, whatever the size of the corpus.
    chosen: list[tuple[int, str]] = []
    total = 0
    for document in corpus.documents("train"):
        text = document.text[:document_bytes]
        # Own person string: the split goes by the plain hash, this choice must not depend on it.
        key = hashlib.blake2b(
            text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"tokenizer"
        ).digest()
        heapq.heappush(chosen, (-int.from_bytes(key, "big"), text))
        total += len(text.encode("utf-8", "surrogatepass"))
        while len(chosen) > 1 and total > max_bytes:
            total -= len(heapq.heappop(chosen)[1].encode("utf-8", "surrogatepass"))
    return [text for _, text in sorted(chosen, reverse=True)]
