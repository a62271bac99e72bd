"""Stop texts: finding them in the bytes of sampled tokens, at the token that completes them.

Works on bytes, because a token may hold half a character and a text may end inside a token. It
knows tokens only by what they spell.
"""

from collections.abc import Callable, Sequence

from headrace.engine.types import EngineError
from headrace.errors import UserError

Pieces = Sequence[bytes] | Callable[[], Sequence[bytes]]
MAX_STOPS = 16
"""Most stop texts of a request."""
MAX_STOP_BYTES = 256
"""Longest stop text."""


class StopMatcher:
    """Searches the output of one request, token by token.

    Of several texts that one token completes, the one that is complete first counts; of those the
    one named first.

    Args:
        stops: the texts.
        pieces: bytes of each token id; ids past the end spell nothing.
    """

    __slots__ = ("_pieces", "_tail", "_texts", "_window")

    def __init__(self, stops: Sequence[str], pieces: Sequence[bytes]) -> None:
        self._texts = [(stop, stop.encode()) for stop in stops]
        self._pieces = pieces
        # As much of the output as may begin a text that later tokens complete.
        self._window = max((len(text) for _, text in self._texts), default=1) - 1
        self._tail = b""

    def feed(self, token: int) -> str | None:
        """The text that the next token of the output completes, or None."""
        piece = self._pieces[token] if token < len(self._pieces) else b""
        if not piece:
            return None
        before = len(self._tail)
        seen = self._tail + piece
        found, end = None, len(seen) + 1
        for stop, text in self._texts:
            # What lies in the tail as a whole was found when its last token came.
            at = seen.find(text, max(0, before - len(text) + 1))
            if at >= 0 and at + len(text) < end:
                found, end = stop, at + len(text)
        self._tail = seen[max(0, len(seen) - self._window) :]
        return found

    def restart(self) -> None:
        """The output begins again."""
        self._tail = b""


class StopTexts:
    """Makes matchers, as far as it is known what tokens spell.

    Args:
        pieces: bytes of each token id, or what gives them, called when they are first needed; None
            refuses all stop texts.
    """

    def __init__(self, pieces: Pieces | None) -> None:
        self._pieces = pieces

    def matcher(self, stops: Sequence[str]) -> StopMatcher | None:
        """For one request; None if it has no stop texts.

        Raises:
            EngineError: INVALID, nobody knows what tokens spell.
        """
        if not stops:
            return None
        if callable(self._pieces):
            try:
                self._pieces = self._pieces()
            except UserError as error:
                raise EngineError(
                    EngineError.INVALID, f"stop cannot be used here: {error}"
                ) from error
        if self._pieces is None:
            raise EngineError(
                EngineError.INVALID,
                "stop cannot be used here: this engine does not know what its tokens spell; give "
                "it a tokenizer or use stop_ids",
            )
        return StopMatcher(stops, self._pieces)


def stop_problems(stops: Sequence[str]) -> list[str]:
    """What is wrong with stop texts, one line each."""
    problems = []
    if len(stops) > MAX_STOPS:
        problems.append(f"stop holds {len(stops)} texts; at most {MAX_STOPS} are allowed")
    for stop in stops:
        try:
            size = len(stop.encode())
        except UnicodeEncodeError:
            problems.append(f"stop holds {stop!r}, which is no Unicode text (a lone surrogate)")
            continue
        if not 1 <= size <= MAX_STOP_BYTES:
            shown = stop if len(stop) <= 20 else f"{stop[:20]}..."
            problems.append(
                f"stop holds {shown!r} of {size} bytes; it must have 1 to {MAX_STOP_BYTES}"
            )
    return problems
