"""A recorded session as a conversation that a person can read.

The evidence is what counts; this picks the messages of one branch out of it and turns tool calls
into the text they stand for. Total: odd messages become odd text, never an error.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.observe.units import readable
from headrace.rollout.types import Call, ParseState, Session


class Turn(msgspec.Struct, frozen=True):
    """One message, made `readable`.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        text: content, tool calls written as `name(argument="value")`.
        reasoning: the assistant's thinking, if any.
        note: what is unusual about it ("malformed tool call", "cut off"), else "".
    """

    role: str
    text: str
    reasoning: str = ""
    note: str = ""


def conversation(session: Session) -> list[Turn]:
    """The messages of the session's last branch, the last answer included.

    A session whose history was rewritten has several branches; the one that ends with the newest
    call is what the agent finally saw. Calls of a judge or teacher are not part of it.
    """
    calls = session.policy_calls
    if not calls:
        return []
    last = calls[-1]
    # The client sends earlier answers back without how they parsed; find it in the calls.
    states = {_fingerprint(call.response): call for call in calls}
    turns = [_turn(message, states) for message in last.messages]
    turns.append(_turn(last.response, {_fingerprint(last.response): last}))
    return turns


def _turn(message: Mapping[str, Any], calls: Mapping[str, Call]) -> Turn:
    role = str(message.get("role", "?"))
    parts = [_text(message.get("content"))]
    for call in message.get("tool_calls") or []:
        parts.append(_call_text(call))
    note = ""
    made_by = calls.get(_fingerprint(message)) if role == "assistant" else None
    if made_by is not None and made_by.parse_state is ParseState.MALFORMED:
        note = "malformed tool call"
    elif made_by is not None and made_by.parse_state is ParseState.TRUNCATED:
        note = f"cut off ({made_by.finish_reason.value})"
    reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
    text = "\n".join(p for p in parts if p)
    return Turn(readable(role), readable(text), readable(reasoning), note)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(
            str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
            for part in content
        )
    return str(content)


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return str(call)
    name, raw = function.get("name", "?"), function.get("arguments", "")
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        arguments = raw
    if not isinstance(arguments, Mapping):
        return f"{name}({arguments})"
    if len(arguments) == 1:
        # The usual case, one command: easier to read without its name and quotes.
        return f"{name}: {next(iter(arguments.values()))}"
    inner = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
    return f"{name}({inner})"


def _fingerprint(message: Mapping[str, Any]) -> str:
    kept = {key: message.get(key) for key in ("content", "tool_calls")}
    return json.dumps(kept, sort_keys=True, default=str)
