"""From a request to the tokens its model reads: held ones extended, or everything rendered afresh.

A request is matched to its session's calls by its messages first. Where that gives nothing, the
tokens it renders to may still begin with everything a call read and wrote. All else is a fork with
a reason (law L1).
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.gateway.context import Change
from headrace.gateway.history import ForkReason
from headrace.gateway.request import ClientRequest, Prompt
from headrace.gateway.sessions import Session
from headrace.gateway.turn import Turn, invalid
from headrace.tokens.messages import Message
from headrace.tokens.renderer import ChatRenderer

Mode = Literal["continue", "native"]
"""Where the tokens of earlier turns come from: those that were held are extended, or everything is
rendered again as the deployed template would."""


def build_prompt(request: ClientRequest, mode: Mode) -> Prompt:
    """The tokens a request's model reads, and which call they continue.

    Raises:
        ApiError: 400, the template has no place for these messages.
    """
    turn, session, renderer = request.turn, request.session, request.renderer
    if turn.prompt is not None:
        ids = turn.prompt
        if isinstance(ids, str):
            ids = tuple(renderer.tokenizer.encode(ids))
        return _by_tokens(session, ids, [], None)
    messages, change = turn.messages, Change.NOTHING
    if session.context is not None:
        messages, change = session.context.apply(
            messages, lambda some: len(render(renderer, some, turn))
        )
    return msgspec.structs.replace(_matched(request, messages, change, mode), change=change)


def _matched(request: ClientRequest, messages: list[Message], change: Change, mode: Mode) -> Prompt:
    """The prompt of these messages, extending the call they continue if there is one."""
    turn, session, renderer = request.turn, request.session, request.renderer
    match = session.history.match(messages, turn.tools)
    fork = match.fork
    if match.parent is not None and mode == "continue":
        held, sampled = match.parent.prompt_ids(), match.parent.call.output_ids
        delta = renderer.bridge(held, sampled, match.new_messages, turn.tools)
        if delta is not None:
            ids = (*held, *sampled, *delta)
            return Prompt(match.parent, None, ids, tuple(delta), messages)
        fork = ForkReason.BRIDGE_REFUSED
    elif match.parent is not None:
        fork = ForkReason.RENDERED
    if fork is not None and change is not Change.NOTHING:
        folded = change is Change.FOLDED
        fork = ForkReason.CONTEXT_FOLDED if folded else ForkReason.CONTEXT_DISCARDED
    ids = tuple(render(renderer, messages, turn))
    return _by_tokens(session, ids, messages, fork)


def _by_tokens(
    session: Session,
    ids: tuple[int, ...],
    messages: list[Message],
    fork: ForkReason | None,
) -> Prompt:
    """Ids that were rendered afresh; what a recorded call holds of them is that call's."""
    if fork is not None or not messages:
        parent = session.history.match_tokens(ids)
        if parent is not None:
            return Prompt(parent, None, ids, ids[parent.path_length :], messages)
        if not messages and session.history.calls:
            fork = ForkReason.NEW_CONVERSATION
    return Prompt(None, fork, ids, ids, messages)


def render(renderer: ChatRenderer, messages: Sequence[Message], turn: Turn) -> list[int]:
    """A prompt rendered afresh.

    Raises:
        ApiError: 400, the template has no place for these messages.
    """
    try:
        return renderer.render(messages, turn.tools)
    except ValueError as error:
        raise invalid(f"messages cannot be rendered: {error}", param="messages") from error
