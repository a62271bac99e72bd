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
from headrace.tokens.thinking import (
    Thinking,
    ThinkingMode,
    request_renderer,
    supported_modes,
)

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


def renderer_for(renderer: ChatRenderer, turn: Turn, thinking: ThinkingMode | None) -> ChatRenderer:
    """The renderer that thinks as the session's mode and the client want it.

    A client may ask for thinking, or for none, of a model that cannot: agents do so by default,
    and the answer is then what the model can do.

    Args:
        renderer: of the checkpoint.
        thinking: the session's mode; None is the template's default.

    Raises:
        ApiError: 400, a budget that the format cannot keep.
    """
    modes = supported_modes(renderer)
    budget = thinking_budget(renderer, turn)
    if turn.prompt is not None or not modes:
        return renderer
    if thinking is None and turn.thinking is None and budget is None:
        return renderer
    mode = thinking or (
        ThinkingMode.INTERLEAVED if ThinkingMode.INTERLEAVED in modes else min(modes)
    )
    enabled = turn.thinking is not False or ThinkingMode.TURN not in modes
    try:
        return request_renderer(renderer, Thinking(mode, enabled, budget))
    except ValueError as error:
        raise invalid(str(error), param="thinking") from error


def thinking_budget(renderer: ChatRenderer, turn: Turn) -> int | None:
    """Most tokens of thinking, where this format can end it."""
    if turn.prompt is not None or renderer.think_end_id is None:
        return None
    if turn.thinking is False and ThinkingMode.TURN not in supported_modes(renderer):
        return 0
    return turn.thinking_budget
