"""The process that measures a checkpoint: requests in, numbers out."""

from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.cluster.worker import WorkerConnection, serve
from headrace.data.corpora import CorpusSpec, open_corpus
from headrace.data.retrieval import RetrievalWriter
from headrace.data.sources import Framing
from headrace.errors import UserError
from headrace.measure.format import chat_examples, chat_format
from headrace.measure.retrieval import retrieval_accuracy
from headrace.measure.text import bits_per_byte
from headrace.model.checkpoint import load_checkpoint
from headrace.model.decoder import Decoder
from headrace.tokens.renderer import create_renderer
from headrace.tokens.tokenizer import TextTokenizer, load_tokenizer


class MeasureWorker:
    """Serves one checkpoint at a time. Methods are the `_do_*` functions below."""

    def __init__(self, connection: WorkerConnection, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._connection = connection
        self._path = Path()
        self._model: Decoder | None = None
        self._tokenizer: TextTokenizer | None = None
        self._prefix: list[int] = []

    def run(self) -> None:
        """Serve until the parent hangs up."""
        serve(self._connection, self, {UserError: "user_error"})

    @property
    def _loaded(self) -> tuple[Decoder, TextTokenizer]:
        if self._model is None or self._tokenizer is None:
            raise RuntimeError("no model is loaded")
        return self._model, self._tokenizer

    def _do_load(self, path: str) -> int:
        """Load a checkpoint; returns its longest sequence."""
        self._path = Path(path)
        self._model = load_checkpoint(self._path).eval()
        self._tokenizer = load_tokenizer(self._path)
        # What every document began with in training, as far as this tokenizer knows it.
        begin = [self._tokenizer.token_id(token) for token in Framing().begin]
        self._prefix = [i for i in begin if i is not None]
        return self._model.config.max_positions

    def _do_text(self, corpus: dict[str, Any], context: int, max_bytes: int) -> dict[str, Any]:
        """Bits per byte of a corpus's held-out part."""
        model, tokenizer = self._loaded
        documents = open_corpus(msgspec.convert(corpus, CorpusSpec)).documents("held_out")
        score = bits_per_byte(
            model,
            tokenizer,
            documents,
            context=min(context, model.config.max_positions),
            max_bytes=max_bytes,
            prefix=self._prefix,
        )
        return score._asdict()

    def _do_retrieval(
        self, length: int, keys: int, examples: int, seed: int, letters: int, digits: int
    ) -> dict[str, Any]:
        """Retrieval accuracy at one length and number of keys."""
        model, tokenizer = self._loaded
        writer = RetrievalWriter(tokenizer, key_letters=letters, value_digits=digits)
        score = retrieval_accuracy(
            model,
            writer,
            length=length,
            keys=keys,
            examples=examples,
            seed=seed,
            prefix=self._prefix,
        )
        return score._asdict()

    def _do_format(
        self, renderer: str, examples: int, max_context: int, max_tokens: int
    ) -> dict[str, Any]:
        """Chat format of held-out conversations."""
        model, _ = self._loaded
        chat = create_renderer(renderer, self._path)
        report = chat_format(
            model,
            chat,
            chat_examples(chat, examples),
            max_context=min(max_context, model.config.max_positions),
            max_tokens=max_tokens,
        )
        return msgspec.to_builtins(report)
