"""One answer as it comes: tokens of the engine in, pieces for the client out.

Text that may turn out to be the beginning of a stop text is held back, since that is no part of the
answer. An engine may begin a request again (new weights, a dead process): what the client was told
already is then expected to come again, and if it does not, the stream ends with an error, because
nothing that was told can be taken back. Knows nothing of HTTP or of any API's events.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.engine.types import Progress
from headrace.gateway.turn import Answer, ApiError, Listener, Piece, Start, ToolCall
from headrace.tokens.parsed import Delta, DeltaKind, StreamReader


class _Channel(NamedTuple):
    """A text of the answer: its reasoning, its content, or the name or arguments of a call."""

    kind: DeltaKind
    call: int | None = None


_REASONING = _Channel(DeltaKind.REASONING)
_CONTENT = _Channel(DeltaKind.CONTENT)


class AnswerStream:
    """Tells a client of one answer.

    Args:
        index: of the answer.
        new_reader: makes a reader of the completion; called again when it begins again. None tells
            everything at the end.
        emit: takes the pieces.
        stops: texts that end the answer and are not part of it.
        call_id: id of the i-th tool call.
    """

    def __init__(
        self,
        index: int,
        new_reader: Callable[[], StreamReader] | None,
        emit: Callable[[Piece], None],
        *,
        stops: tuple[str, ...] = (),
        call_id: Callable[[int], str],
    ) -> None:
        self._index = index
        self._new_reader = new_reader
        self._reader = None if new_reader is None else new_reader()
        self._emit = emit
        self._stops = stops
        self._longest = max(map(len, stops), default=1) - 1
        self._call_id = call_id
        self._told: dict[_Channel, list[str]] = {}
        # After a beginning anew: what of it has to come again.
        self._expected: dict[_Channel, str] = {}
        self._held: tuple[_Channel, str] = (_CONTENT, "")
        self._stopped = False
        self._broken = False

    def progress(self, progress: Progress) -> None:
        """The engine sampled some tokens, or begins again."""
        if self._new_reader is None:
            return
        if progress.restart:
            self._reader = self._new_reader()
            self._expected = {key: "".join(told) for key, told in self._told.items()}
            self._held, self._stopped = (_CONTENT, ""), False
        self.feed(progress.ids)

    def feed(self, ids: Sequence[int]) -> None:
        """Ids of the answer that nobody sampled."""
        if self._reader is not None and ids and not self._stopped:
            for delta in self._reader.feed(ids):
                self._take(delta)

    def _take(self, delta: Delta) -> None:
        channel = _Channel(delta.kind, delta.call)
        if delta.kind not in (DeltaKind.REASONING, DeltaKind.CONTENT):
            self._release()
            self._tell(channel, delta.text)
            return
        if self._held[0] != channel:
            self._release()
        text = (self._held[1] if self._held[0] == channel else "") + delta.text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._stopped = True
            self._held = (channel, "")
            self._tell(channel, text[: min(ends)])
            return
        keep = len(text) - self._longest if self._stops else len(text)
        keep = max(0, keep)
        self._held = (channel, text[keep:])
        self._tell(channel, text[:keep])

    def _release(self) -> None:
        """Another text begins, so what was held back is no stop text."""
        channel, text = self._held
        self._held = (_CONTENT, "")
        self._tell(channel, text)

    def _tell(self, channel: _Channel, text: str) -> None:
        expected = self._expected.get(channel, "")
        if expected:
            same = min(len(expected), len(text))
            if expected[:same] != text[:same]:
                self._broken = True
            self._expected[channel], text = expected[same:], text[same:]
        if not text or self._broken:
            return
        self._told.setdefault(channel, []).append(text)
        self._emit(self._piece(channel, text))

    def _piece(self, channel: _Channel, text: str) -> Piece:
        if channel.kind is DeltaKind.REASONING:
            return Piece(self._index, reasoning=text)
        if channel.kind is DeltaKind.CONTENT:
            return Piece(self._index, content=text)
        if channel.kind is DeltaKind.CALL:
            call = ToolCall(self._call_id(channel.call or 0), text, "")
            return Piece(self._index, call=call)
        return Piece(self._index, arguments=text)

    def finish(self, answer: Answer) -> None:
        """Tell what is left of the complete answer.

        Raises:
            ApiError: 503, it is not what the client was told so far.
        """
        rest = [(_REASONING, answer.reasoning or ""), (_CONTENT, answer.content)]
        for i, call in enumerate(answer.tool_calls):
            rest.append((_Channel(DeltaKind.CALL, i), call.name))
            rest.append((_Channel(DeltaKind.ARGUMENTS, i), call.arguments))
        told = {channel: "".join(texts) for channel, texts in self._told.items()}
        whole = dict(rest)
        if any(not whole.get(channel, "").startswith(text) for channel, text in told.items()):
            self._broken = True
        if self._broken:
            raise ApiError(
                503,
                "restarted",
                "the model began this answer again, with another text than was streamed; retry",
            )
        self._expected = {}
        for channel, text in rest:
            self._tell(channel, text[len(told.get(channel, "")) :])


def replay(answers: Sequence[Answer], listener: Listener) -> None:
    """Stream answers that are complete already."""
    first = answers[0]
    listener.start(Start(first.response_id, first.created, first.usage.prompt))
    for answer in answers:
        if answer.reasoning:
            listener.piece(Piece(answer.index, reasoning=answer.reasoning))
        if answer.content:
            listener.piece(Piece(answer.index, content=answer.content))
        for call in answer.tool_calls:
            listener.piece(Piece(answer.index, call=call))
