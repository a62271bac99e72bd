"""How one call becomes bytes in the ledger and comes back equal. Pure functions, no I/O.

A conversation grows turn by turn and every call repeats it, so a call stores only the messages that
its parent does not have, as it stores only its prompt delta. What clients send is kept as JSON text
and not as msgpack: JSON carries everything JSON can say (integers of any size, lone surrogates).
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.rollout.types import Call, FinishReason, ParseState, Span


class _StoredCall(msgspec.Struct, frozen=True, array_like=True):
    """The part of a call that is not in a column of its own."""

    shared: int
    """How many leading messages are those of the parent call."""
    messages: list[bytes]
    """The others, one JSON text each."""
    response: bytes
    idempotency_key: bytes | None
    renderer_id: str
    prompt_delta: tuple[int, ...]
    spans: tuple[Span, ...]
    started_at: float
    finished_at: float
    model: str | None = None


class _StoredReply(msgspec.Struct, frozen=True, array_like=True):
    """The same bytes, where only who answered what is of interest: the rest is not looked into."""

    shared: msgspec.Raw
    messages: msgspec.Raw
    response: bytes
    idempotency_key: msgspec.Raw
    renderer_id: msgspec.Raw
    prompt_delta: msgspec.Raw
    spans: msgspec.Raw
    started_at: msgspec.Raw
    finished_at: msgspec.Raw
    model: str | None = None


class CallColumns(msgspec.Struct, frozen=True):
    """The columns that hold the rest of a call."""

    id: str
    session_id: str
    index: int
    parent_id: str | None
    fork_reason: str | None
    finish_reason: str
    parse_state: str
    tools: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StoredCall)
_reply_decoder = msgspec.msgpack.Decoder(_StoredReply)


def encode_json(value: Any) -> bytes:
    """JSON text of a JSON-compatible value, lossless for everything Python's json can read."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def decode_json(text: bytes | str) -> Any:
    """The inverse of `encode_json`."""
    return json.loads(text.decode("utf-8", "surrogatepass") if isinstance(text, bytes) else text)


def encode_messages(messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """One JSON text per message."""
    return [encode_json(message) for message in messages]


def encode_call(call: Call, messages: list[bytes], parent: Sequence[bytes]) -> bytes:
    """Bytes of everything in `call` that has no column.

    Args:
        call: the call.
        messages: `encode_messages(call.messages)`.
        parent: the same of its parent call; empty to store all messages here.
    """
    shared = 0
    for own, other in zip(messages, parent, strict=False):
        # Texts, not values: in Python True == 1 == 1.0, but they are not the same evidence.
        if own != other:
            break
        shared += 1
    key = call.idempotency_key
    return _encoder.encode(
        _StoredCall(
            shared,
            messages[shared:],
            encode_json(call.response),
            None if key is None else key.encode("utf-8", "surrogatepass"),
            call.renderer_id,
            call.prompt_delta,
            call.spans,
            call.started_at,
            call.finished_at,
            call.model,
        )
    )


def decode_call(columns: CallColumns, body: bytes, parent: Sequence[dict[str, Any]]) -> Call:
    """The call again.

    Args:
        columns: what the table holds beside the body.
        body: from `encode_call`.
        parent: full messages of the parent call; empty when there is none.

    Raises:
        ValueError: the bytes are damaged (msgspec's errors are ValueErrors).
    """
    stored = _decoder.decode(body)
    if stored.shared > len(parent):
        raise ValueError(f"shares {stored.shared} messages with a parent of {len(parent)}")
    key = stored.idempotency_key
    return Call(
        id=columns.id,
        session_id=columns.session_id,
        index=columns.index,
        parent_id=columns.parent_id,
        fork_reason=columns.fork_reason,
        idempotency_key=None if key is None else key.decode("utf-8", "surrogatepass"),
        messages=[*parent[: stored.shared], *(decode_json(text) for text in stored.messages)],
        tools=decode_json(columns.tools),
        renderer_id=stored.renderer_id,
        prompt_delta=stored.prompt_delta,
        spans=stored.spans,
        finish_reason=FinishReason(columns.finish_reason),
        parse_state=ParseState(columns.parse_state),
        response=decode_json(stored.response),
        started_at=stored.started_at,
        finished_at=stored.finished_at,
        model=stored.model,
    )


def decode_spans(body: bytes) -> tuple[Span, ...]:
    """Only the sampled output of a stored call.

    Raises:
        ValueError: the bytes are damaged.
    """
    return _decoder.decode(body).spans


def decode_messages(body: bytes) -> list[Any]:
    """What was said in a stored call and not yet in its parent: messages, then the response.

    Raises:
        ValueError: the bytes are damaged.
    """
    stored = _decoder.decode(body)
    return [decode_json(text) for text in (*stored.messages, stored.response)]


def decode_reply(body: bytes) -> tuple[str | None, dict[str, Any]]:
    """Which model beside the one that learns answered (None: that one), and its response.

    Raises:
        ValueError: the bytes are damaged.
    """
    stored = _reply_decoder.decode(body)
    return stored.model, decode_json(stored.response)
