"""What every HTTP request between a run and its task services passes: token, version, size, form.

Both sides serve a port with it: a task service its rollouts, a run its register. It knows the
types that go over the wire by name only.
"""

import asyncio
import secrets
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.tasks.serving.wire import PROTOCOL, VERSION_HEADER, ErrorAnswer, Problem

_encode = msgspec.json.Encoder().encode

Body = TypeVar("Body")


class Refusal(Exception):
    """A request that is not answered: HTTP status, code and words."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def shows(request: Request, token: bytes) -> bool:
    """Whether a request carries this bearer token; takes as long when it is nearly right."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    same = secrets.compare_digest(sent.strip().encode("utf-8", "replace"), token)
    return scheme.lower() == "bearer" and same


def check_version(request: Request, who: str) -> None:
    """Raise Refusal unless a request speaks this version of the protocol; `who` does."""
    spoken = request.headers.get(VERSION_HEADER)
    if spoken != str(PROTOCOL):
        raise Refusal(
            400,
            "protocol_version",
            f"{VERSION_HEADER} is {spoken!r}, but {who} speaks version {PROTOCOL} of the "
            "protocol; use matching versions of headrace on both sides",
        )


async def read_body(request: Request, kind: type[Body], *, most: int, within_s: float) -> Body:
    """The JSON body of a request, as its type.

    Args:
        request: whose.
        kind: what it has to be.
        most: bytes of it.
        within_s: seconds for it to arrive.

    Raises:
        Refusal: too large, too slow, or not what it should be.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise Refusal(413, "body_too_large", f"the body is larger than {most} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise Refusal(
            408, "body_timeout", f"the body did not arrive within {within_s:g} s"
        ) from None
    try:
        return msgspec.json.decode(b"".join(chunks), type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(422, "invalid", str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(400, "malformed", f"the body is no JSON: {error}") from error


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(_encode(value), status, headers=headers, media_type="application/json")


def refuse(refusal: Refusal) -> Response:
    """The answer that a refusal is."""
    headers = None
    if refusal.retry_after_s is not None:
        headers = {"Retry-After": str(refusal.retry_after_s)}
    return answer(ErrorAnswer(Problem(refusal.code, refusal.message)), refusal.status, headers)
