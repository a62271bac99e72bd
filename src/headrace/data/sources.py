"""A training source: which documents of a corpus, in which shape, as tokens.

`open_source` turns a `SourceSpec` into a `TokenStore`: plain documents, related files joined,
commits made up over them, or synthetic retrieval. Stores are cached by the content of the corpus,
the tokenizer and the spec, so each is tokenised once on a machine.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from headrace.data.corpora import CorpusSpec, open_corpus
from headrace.data.documents import Document
from headrace.data.repositories import Commit, file_text, related_files, synthetic_commit
from headrace.data.retrieval import RetrievalSpec, retrieval_examples
from headrace.data.token_store import FORMAT, TokenDocument, TokenStore, cached_store
from headrace.errors import UserError
from headrace.tokens.tokenizer import TextTokenizer

Shape = Literal["documents", "related", "commits", "retrieval"]
SHAPES: tuple[Shape, ...] = ("documents", "related", "commits", "retrieval")

_log = logging.getLogger(__name__)

_BATCH_CHARACTERS = 1 << 20
_CHARACTERS_PER_TOKEN = 4
"""About the most that text of a context has; longer files are not even tried."""
_COMMIT_ATTEMPTS = 4
_STRIDE = 7919
_MAKING = 1
"""Raised whenever a spec gives other tokens than before, so that no stale store is used."""


@dataclass(frozen=True)
class Framing:
    """Special tokens around every document; no loss falls on `begin`, it does on `end`.

    Attributes:
        begin: tokens before each document.
        end: tokens after each document.
    """

    begin: tuple[str, ...] = ("[gMASK]", "<sop>")
    end: tuple[str, ...] = ("<|endoftext|>",)


@dataclass(frozen=True)
class SourceSpec:
    """One source of a mixture.

    Attributes:
        corpus: where text comes from; a string is a `CorpusSpec.source`. Not read by "retrieval".
        weight: its share of a mixture's tokens, relative to the other sources' weights.
        shape: "documents": each document as it is; "related": files of a group joined, with paths;
            "commits": files of a group before a made-up change, then its message and diff;
            "retrieval": synthetic facts and questions.
        split: "train" or "held_out", for text by content and for retrieval by keys.
        kinds: kinds of documents to take (e.g. "code"); empty: all.
        tokens: most tokens of a joined document ("related", "commits"), framing included.
        count: how many documents to make ("commits", "retrieval").
        min_tokens: shorter documents are left out; a second source of the same corpus with
            min_tokens up-samples its long documents.
        diff_weight: loss weight of a commit's message and diff, the files before it having 1.
        retrieval: sizes of retrieval documents.
        seed: other seeds make other commits and retrieval documents.
    """

    corpus: CorpusSpec | str = "builtin"
    weight: float = 1.0
    shape: Shape = "documents"
    split: Literal["train", "held_out"] = "train"
    kinds: tuple[str, ...] = ()
    tokens: int = 4096
    count: int = 500
    min_tokens: int = 0
    diff_weight: float = 1.0
    retrieval: RetrievalSpec = field(default_factory=RetrievalSpec)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UserError(f"source shape = {self.shape!r}: use one of {', '.join(SHAPES)}")
        if self.split not in ("train", "held_out"):
            raise UserError(f"source split = {self.split!r}: use 'train' or 'held_out'")
        if not self.weight > 0:
            raise UserError(f"source weight = {self.weight}: must be above 0; or leave it out")
        if self.tokens < 64:
            raise UserError(f"source tokens = {self.tokens}: must be at least 64")
        if self.count < 1:
            raise UserError(f"source count = {self.count}: must be at least 1")
        if self.diff_weight < 0:
            raise UserError(f"source diff_weight = {self.diff_weight}: must not be negative")


def default_cache() -> Path:
    """Where token stores are kept: headrace/tokens in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace" / "tokens"


def open_source(
    spec: SourceSpec,
    tokenizer: TextTokenizer,
    framing: Framing | None = None,
    cache_dir: Path | None = None,
) -> TokenStore:
    """Tokens of a source, from the cache where they are already there.

    Args:
        spec: which documents.
        tokenizer: encodes them as plain text.
        framing: special tokens around each; None: the default ones.
        cache_dir: None: `default_cache()`.

    Raises:
        UserError: unreadable corpus, a framing token that the tokenizer lacks, or no document at
            all.
    """
    framing = framing or Framing()
    maker = _Maker(spec, tokenizer, framing)
    key = store_key(spec, tokenizer, framing)
    store = cached_store(cache_dir or default_cache(), key, maker.documents)
    if store.total_tokens == 0:
        raise UserError(
            f"source {spec.shape} of {_name(spec)!r} ({spec.split}): no documents; "
            "lower min_tokens or widen kinds, globs or held_out"
        )
    return store


def store_key(spec: SourceSpec, tokenizer: TextTokenizer, framing: Framing) -> str:
    """Name of the source's store: equal exactly when the tokens are."""
    identity: list[object] = [FORMAT, _MAKING, tokenizer.fingerprint, framing]
    identity += [spec.shape, spec.split, spec.min_tokens]
    if spec.shape != "retrieval":
        identity += [open_corpus(spec.corpus).fingerprint, spec.kinds]
    if spec.shape in ("related", "commits"):
        identity.append(spec.tokens)
    if spec.shape in ("commits", "retrieval"):
        identity += [spec.count, spec.seed]
    if spec.shape == "commits":
        identity.append(spec.diff_weight)
    if spec.shape == "retrieval":
        identity.append(spec.retrieval)
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def _name(spec: SourceSpec) -> str:
    return spec.corpus if isinstance(spec.corpus, str) else spec.corpus.source


class _Maker:
    """Makes the documents of one source."""

    def __init__(self, spec: SourceSpec, tokenizer: TextTokenizer, framing: Framing) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._begin = [self._special(token, "begin") for token in framing.begin]
        self._end = [self._special(token, "end") for token in framing.end]
        self._room = spec.tokens - len(self._begin) - len(self._end)

    def _special(self, token: str, place: str) -> int:
        found = self._tokenizer.token_id(token)
        if found is None:
            raise UserError(
                f"framing {place} {token!r}: tokenizer {self._tokenizer.name_or_path!r} has no "
                f"such token; set framing.{place} to tokens it has, or to none"
            )
        return found

    def documents(self) -> Iterator[TokenDocument]:
        makers = {
            "documents": self._plain,
            "related": self._related,
            "commits": self._commits,
            "retrieval": self._retrieval,
        }
        for document in makers[self._spec.shape]():
            if len(document.ids) >= self._spec.min_tokens:
                yield document

    def _texts(self) -> Iterator[Document]:
        for document in open_corpus(self._spec.corpus).documents(self._spec.split):
            if not self._spec.kinds or document.kind in self._spec.kinds:
                yield document

    def _framed(
        self, ids: list[int] | np.ndarray, text_bytes: int, weights: np.ndarray | None = None
    ) -> TokenDocument:
        framed = np.concatenate([self._begin, ids, self._end]).astype(np.int32)
        if weights is not None:
            weights = np.concatenate(
                [np.zeros(len(self._begin)), weights, np.ones(len(self._end))]
            ).astype(np.float32)
        return TokenDocument(framed, text_bytes, weights, max(1, len(self._begin)))

    def _plain(self) -> Iterator[TokenDocument]:
        for batch in _batches(self._texts()):
            texts = [document.text for document in batch]
            for text, ids in zip(texts, self._tokenizer.encode_texts(texts), strict=True):
                yield self._framed(ids, _size(text))

    def _related(self) -> Iterator[TokenDocument]:
        """Consecutive files of a group as long as they fit; a file too long goes alone."""
        for files in related_files(self._texts()):
            texts = [file_text(file.id, file.text) for file in files]
            joined: list[int] = []
            size = 0
            for text, ids in zip(texts, self._tokenizer.encode_texts(texts), strict=True):
                if joined and len(joined) + len(ids) > self._room:
                    yield self._framed(joined, size)
                    joined, size = [], 0
                joined = joined + ids
                size += _size(text)
            yield self._framed(joined, size)

    def _commits(self) -> Iterator[TokenDocument]:
        """Commits whose changed files and diff fit; other files of the group fill the space."""
        groups = related_files(self._texts())
        # Groups of many files get more commits; a stride mixes the groups.
        turns = [group for group in groups for _ in group]
        made = 0
        encoded: dict[str, list[int]] = {}
        for i in range(_COMMIT_ATTEMPTS * self._spec.count if turns else 0):
            group = turns[i * _STRIDE % len(turns)]
            commit = synthetic_commit(
                group, f"{self._spec.seed}/{i}", self._room * _CHARACTERS_PER_TOKEN
            )
            document = None if commit is None else self._commit(commit, group, encoded)
            if document is not None:
                yield document
                made += 1
                if made == self._spec.count:
                    return
        if made < self._spec.count:
            _log.warning(
                "source commits of %r: %d of %d commits of at most %d tokens found",
                _name(self._spec),
                made,
                self._spec.count,
                self._spec.tokens,
            )

    def _commit(
        self, commit: Commit, group: list[Document], encoded: dict[str, list[int]]
    ) -> TokenDocument | None:
        change = commit.change_text()
        texts = [*(file_text(path, text) for path, text in commit.before), change]
        parts = self._tokenizer.encode_texts(texts)
        free = self._room - sum(map(len, parts))
        if free < 0:
            return None
        context: list[int] = []
        context_bytes = 0
        changed = {path for path, _ in commit.before}
        for file in group:
            text = file_text(file.id, file.text)
            if file.id in changed or len(text) > free * _CHARACTERS_PER_TOKEN:
                continue
            ids = encoded.get(file.id)
            if ids is None:
                ids = encoded[file.id] = self._tokenizer.encode_text(text)
            if len(ids) <= free:
                context += ids
                free -= len(ids)
                context_bytes += _size(text)
        ids = [*context, *(token for part in parts for token in part)]
        weights = np.ones(len(ids), np.float32)
        weights[len(ids) - len(parts[-1]) :] = self._spec.diff_weight
        return self._framed(ids, context_bytes + sum(map(_size, texts)), weights)

    def _retrieval(self) -> Iterator[TokenDocument]:
        spec = self._spec
        for example in retrieval_examples(
            spec.retrieval, self._tokenizer, spec.count, spec.seed, spec.split
        ):
            weights = example.weights(spec.retrieval.answer_weight, spec.retrieval.context_weight)
            yield self._framed(example.ids, _size(example.text), weights)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
