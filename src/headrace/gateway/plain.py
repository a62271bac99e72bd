"""Reads a completion that is no chat message: its text as it comes, nothing else."""

from collections.abc import Sequence

from headrace.rollout.types import ParseState
from headrace.tokens.detokenise import Detokeniser, TokenBytes
from headrace.tokens.parsed import Delta, DeltaKind, ParsedMessage


class PlainReader:
    """See `StreamReader`.

    Args:
        token_bytes: of the tokenizer.
        stop_ids: the last id may be one of these, which is no text.
    """

    def __init__(self, token_bytes: TokenBytes, stop_ids: Sequence[int]) -> None:
        self._detokeniser = Detokeniser(token_bytes)
        self._stop_ids = stop_ids
        self._stopped = False
        self._texts: list[str] = []

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `StreamReader.feed`."""
        self._stopped = bool(ids) and ids[-1] in self._stop_ids
        return self._told(self._detokeniser.feed(ids[:-1] if self._stopped else ids))

    def finish(self) -> tuple[list[Delta], ParsedMessage]:
        """See `StreamReader.finish`."""
        deltas = self._told(self._detokeniser.flush())
        text = "".join(self._texts)
        state = ParseState.OK if self._stopped else ParseState.TRUNCATED
        return deltas, ParsedMessage(text, None, (), state, text)

    def _told(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._texts.append(text)
        return [Delta(DeltaKind.CONTENT, text)]
