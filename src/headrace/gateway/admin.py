"""Sessions for task services outside: opened over HTTP with a task, a group and limits, closed with
an outcome, and handed over with everything that was recorded.

Behind a key of its own, which no agent has. It knows sessions, and nothing of ledgers or training.
"""

import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headrace.gateway.apis.openai_chat import error_body
from headrace.gateway.app import json_response, read_body
from headrace.gateway.gateway import Gateway
from headrace.gateway.turn import ApiError, decode, invalid
from headrace.rollout.types import Outcome, Session, SessionLimits

MAX_BODY_BYTES = 64 * 1024
KEPT_SESSIONS = 1024
"""Closed sessions whose evidence can still be asked for."""
MAX_OPEN = 65_536
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class _Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /admin/sessions."""

    task: str
    group: str
    session: str | None = None
    """Its id; by default one is made up."""
    instance: dict[str, Any] = {}
    limits: SessionLimits = SessionLimits()
    seed: int | None = None


class _Close(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /admin/sessions/ID/close."""

    outcome: Outcome
    reason: str = ""
    rewards: dict[str, float] = {}


def add_admin_routes(app: FastAPI, gateway: Gateway, admin_key: str) -> None:
    """Serve POST /admin/sessions, POST /admin/sessions/ID/close and GET /admin/sessions/ID.

    Args:
        admin_key: bearer token that all three need.
    """
    opened: dict[str, Session] = {}
    closed: OrderedDict[str, Session] = OrderedDict()

    async def create(request: Request) -> dict[str, Any]:
        body = decode(await read_body(request, MAX_BODY_BYTES), _Open)
        name = body.session or f"{body.group}-{secrets.token_hex(6)}"
        for field, value in (("task", body.task), ("group", body.group), ("session", name)):
            if not _NAME.fullmatch(value):
                raise invalid(
                    f"{field}={value[:40]!r}: use 1 to 128 letters, digits, '.', '_' and '-'",
                    param=field,
                )
        for field in body.limits.__struct_fields__:
            value = getattr(body.limits, field)
            if value is not None and not value > 0:
                raise invalid(
                    f"limits.{field}={value}: must be positive; leave it out for the default",
                    param=f"limits.{field}",
                )
        if len(opened) >= MAX_OPEN:
            raise ApiError(429, "overloaded", f"{MAX_OPEN} sessions are open; close some")
        if name in opened or name in closed:
            raise ApiError(409, "session_exists", f"session {name!r} exists; choose another id")
        try:
            key = gateway.open_session(name, limits=body.limits, seed=body.seed)
        except ValueError as error:
            raise ApiError(409, "session_exists", f"{error}; choose another id") from error
        opened[name] = Session(name, "", "train", body.task, body.instance, body.group)
        return {"session": name, "key": key, "models": list(gateway.models)}

    async def close(request: Request) -> dict[str, Any]:
        name = request.path_params["session"]
        body = decode(await read_body(request, MAX_BODY_BYTES), _Close)
        if name not in opened:
            state = "closed already" if name in closed else "unknown"
            raise ApiError(404, "session_not_found", f"session {name!r} is {state}")
        if body.outcome.scored and "reward" not in body.rewards:
            raise invalid(
                f"outcome={body.outcome}: it has a reward; send rewards.reward", param="rewards"
            )
        record = opened.pop(name)
        limit = gateway.exceeded(name)
        calls = await gateway.close_session(name)
        rewards = body.rewards if body.outcome.scored else {}
        reason = body.reason or (f"session limit ({limit})" if limit else "")
        closed[name] = msgspec.structs.replace(
            record, outcome=body.outcome, reason=reason, rewards=rewards, calls=calls
        )
        while len(closed) > KEPT_SESSIONS:
            closed.popitem(last=False)
        return _summary(closed[name])

    async def show(request: Request) -> dict[str, Any]:
        name = request.path_params["session"]
        if name in opened:
            return msgspec.to_builtins(
                msgspec.structs.replace(opened[name], calls=gateway.calls(name))
            )
        if name not in closed:
            raise ApiError(404, "session_not_found", f"session {name!r} is unknown")
        return msgspec.to_builtins(closed[name])

    def guarded(answer: Callable[[Request], Awaitable[dict[str, Any]]]) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                scheme, _, key = request.headers.get("authorization", "").partition(" ")
                if scheme.lower() != "bearer" or not secrets.compare_digest(
                    key.strip().encode(), admin_key.encode()
                ):
                    raise ApiError(401, "invalid_admin_key", "send the admin key as bearer token")
                return json_response(await answer(request))
            except ApiError as error:
                return json_response(error_body(error), error.status)

        return endpoint

    app.add_route("/admin/sessions", guarded(create), methods=["POST"])
    app.add_route("/admin/sessions/{session}/close", guarded(close), methods=["POST"])
    app.add_route("/admin/sessions/{session}", guarded(show), methods=["GET"])


def _summary(session: Session) -> dict[str, Any]:
    """A closed session in a few numbers; GET has the evidence."""
    return {
        "session": session.id,
        "task": session.task,
        "group": session.group_id,
        "outcome": session.outcome,
        "reason": session.reason,
        "rewards": session.rewards,
        "calls": len(session.calls),
        "sampled_tokens": sum(len(call.output_ids) for call in session.policy_calls),
    }
