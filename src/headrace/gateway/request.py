"""One client request on its way: what it asked for, its prompt, and the calls it has taken.

Plain data and bookkeeping. Nothing here waits, renders or knows an API.
"""

from collections.abc import Sequence

import msgspec

from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.gateway.context import Change
from headrace.gateway.history import ForkReason, Node
from headrace.gateway.sessions import Session
from headrace.gateway.turn import Listener, Turn
from headrace.tokens.messages import Message
from headrace.tokens.renderer import ChatRenderer


class Prompt(msgspec.Struct, frozen=True):
    """The tokens of a request and where they come from."""

    parent: Node | None
    fork: ForkReason | None
    ids: tuple[int, ...]
    delta: tuple[int, ...]
    messages: list[Message]
    """What the model reads, after context management."""
    change: Change = Change.NOTHING
    """What context management did to it."""


class Attempt:
    """One answer on its way, over all calls it takes.

    Args:
        prompt: of the first call.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        """Of the present call."""
        self.base = prompt.ids
        """Where the message to be read begins."""
        self.lead: list[int] = []
        """What stands of it before the present call, sampled or not."""
        self.results: list[GenerationResult] = []
        self.sampled = 0
        self.prompt_length = len(prompt.ids)

    def go_on(self, node: Node, result: GenerationResult, delta: Sequence[int]) -> None:
        """The next call continues the same message."""
        output = output_ids(result)
        ids = (*self.prompt.ids, *output, *delta)
        self.prompt = Prompt(node, None, ids, tuple(delta), self.prompt.messages)
        self.lead += [*output, *delta]
        self.results.append(result)
        self.sampled += len(output)

    def anew(self, node: Node, result: GenerationResult, delta: Sequence[int]) -> "Attempt":
        """The next call is another message, to be shown in the place of this one."""
        ids = (*self.prompt.ids, *output_ids(result), *delta)
        other = Attempt(Prompt(node, None, ids, tuple(delta), self.prompt.messages))
        other.results = [*self.results, result]
        other.sampled = self.sampled + len(output_ids(result))
        other.prompt_length = self.prompt_length
        return other


class ClientRequest(msgspec.Struct, frozen=True):
    """One client request on its way."""

    session: Session
    turn: Turn
    renderer: ChatRenderer
    budget: int | None
    idempotency_key: str | None
    serial: int
    ordinal: int
    listener: Listener | None

    @property
    def response_id(self) -> str:
        """What its response is called; no other request of any session has it."""
        return f"{self.session.id}-{self.serial}"

    def generation(
        self, request_id: str, ids: tuple[int, ...], sampling: SamplingParams, timeout_s: float
    ) -> GenerationRequest:
        """What an engine is asked for. A session of one request is none to it."""
        session = "" if self.session.anonymous else self.session.id
        return GenerationRequest(request_id, ids, sampling, timeout_s=timeout_s, session=session)

    def call_id(self, k: int, i: int) -> str:
        """Id of tool call i of answer k: unique in the session, and known before the answer is."""
        return f"call_{self.serial}_{i}" if k == 0 else f"call_{self.serial}_{k}_{i}"


def output_ids(result: GenerationResult) -> list[int]:
    """Everything an engine sampled."""
    return [token for span in result.spans for token in span.ids]
