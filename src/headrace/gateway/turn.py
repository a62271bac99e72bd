"""A request and its answer in the gateway's own terms, whichever API they came through.

Each API has a module that reads its bodies into a `Turn`, writes an `Answer` (or its pieces as they
come) back, and shapes an `ApiError`. The gateway itself sees nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from headrace.engine.checks import LEAST_TEMPERATURE, MAX_ALTERNATIVES, MAX_BIAS, RANGES, Range
from headrace.engine.sampling.stops import stop_problems
from headrace.tokens.messages import Message, check_tools, normalise

MAX_SAMPLES = 64
"""Most answers to one request (n)."""
_RANGES = {"temperature": Range(0.0, 2.0, "0 is greedy"), **RANGES}
"""The temperature's as OpenAI documents it; engines take more."""


class ApiError(Exception):
    """A refusal: HTTP status, code, and text for the client's developer.

    Attributes:
        param: the parameter at fault, or None.
        retry_after_s: when it may work, or None.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def invalid(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """A 400."""
    return ApiError(400, code, message, param=param)


def unsupported(param: str, value: object, remedy: str) -> ApiError:
    """A 400 for what the API has and this server has not: refused, never ignored."""
    return invalid(f"{param}={value!r} is not supported; {remedy}", param=param, code="unsupported")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, as asked; None leaves it to the server.

    Attributes:
        stop: texts that end the answer and are not part of it.
        logprobs: None for none; k adds k alternatives to each token's own logprob.
        echo: tell the prompt back, too, and its logprobs where logprobs are wanted.
        max_tokens: 0 with `echo` alone: nothing is sampled.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False

    @classmethod
    def of(cls, **asked: Any) -> "Wish":
        """What a request says; where it says nothing (None), the default."""
        return cls(**{name: value for name, value in asked.items() if value is not None})


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A form that an answer has to have.

    Attributes:
        schema: JSON schema of its text; None leaves the text free.
        tool: the tool to be called, "" for any; None forces no call.
        param: where the client asked for it, for messages.
    """

    schema: dict[str, Any] | None = None
    tool: str | None = None
    param: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One checked request.

    Attributes:
        sent: messages as the client wrote them, in chat form, for the record.
        messages: the same, normalised.
        tools: OpenAI function tools that the prompt shows.
        calls_allowed: False where the client wants no tool calls.
        n: answers wanted.
        wish: how to sample.
        prompt: text or ids to continue as they are, without a template; then there are no messages.
        model: as named by the client.
        thinking: whether to think; None leaves it to the server.
        thinking_budget: most tokens of thinking; None for no limit.
        constraint: the form that the answer has to have, or None.

    Raises:
        ApiError: 400, naming the parameter, its value and what to send instead.
    """

    sent: list[dict[str, Any]] = []
    messages: list[Message] = []
    tools: list[dict[str, Any]] = []
    calls_allowed: bool = True
    n: int = 1
    wish: Wish = Wish()
    prompt: str | tuple[int, ...] | None = None
    model: str = ""
    thinking: bool | None = None
    thinking_budget: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for problem, param in _problems(self):
            raise invalid(problem, param=param)


def _problems(turn: Turn) -> Iterator[tuple[str, str]]:
    """What is out of range, and the parameter; comparisons are written so that NaN fails them."""
    n, wish, budget = turn.n, turn.wish, turn.thinking_budget
    if not 1 <= n <= MAX_SAMPLES:
        yield f"n={n} is out of range; send 1 to {MAX_SAMPLES}", "n"
    if budget is not None and budget < 0:
        yield f"a thinking budget of {budget} is negative; send 0 or more", "thinking"
    if wish.max_tokens is not None and wish.max_tokens < (0 if wish.echo else 1):
        yield f"max_tokens={wish.max_tokens} is too small; send at least 1", "max_tokens"
    if wish.max_tokens == 0 and n > 1:
        yield f"n={n} with max_tokens=0 samples nothing; send n=1", "n"
    for name, (low, high, _) in _RANGES.items():
        if not low <= (value := getattr(wish, name)) <= high:
            yield f"{name}={value} is out of range; send {low:g} to {high:g}", name
    if 0 < wish.temperature < LEAST_TEMPERATURE:
        yield f"temperature={wish.temperature} is too small; send 0", "temperature"
    if not 0.0 < wish.top_p <= 1.0:
        yield f"top_p={wish.top_p} is out of range; send above 0 up to 1", "top_p"
    if wish.top_k < 0:
        yield f"top_k={wish.top_k} is negative; send 0 for no limit", "top_k"
    for problem in stop_problems(wish.stop):
        yield problem, "stop"
    if not 0 <= (wish.logprobs or 0) <= MAX_ALTERNATIVES:
        yield (
            f"top_logprobs={wish.logprobs} is out of range; send 0 to {MAX_ALTERNATIVES}",
            "top_logprobs",
        )
    for token, bias in wish.logit_bias.items():
        if token < 0 or not -MAX_BIAS <= bias <= MAX_BIAS:
            yield (
                f"logit_bias of {token} is {bias}; send ids with -{MAX_BIAS} to {MAX_BIAS}",
                "logit_bias",
            )


def new_turn(
    sent: list[dict[str, Any]],
    *,
    messages: list[Message] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    n: int = 1,
    wish: Wish,
    calls_allowed: bool = True,
    model: str = "",
    thinking: bool | None = None,
    thinking_budget: int | None = None,
    constraint: Constraint | None = None,
) -> Turn:
    """A turn of a conversation.

    Args:
        messages: `sent`, normalised, where that is done already.

    Raises:
        ApiError: 400.
    """
    try:
        if messages is None:
            messages = normalise(sent)
        check_tools(tools)
    except ValueError as error:
        raise invalid(str(error), param="messages") from error
    return Turn(
        sent=sent,
        messages=messages,
        tools=list(tools),
        calls_allowed=calls_allowed,
        n=n,
        wish=wish,
        model=model,
        thinking=thinking,
        thinking_budget=thinking_budget,
        constraint=constraint,
    )


class ToolCall(NamedTuple):
    """A call in an answer; `arguments` is JSON text, `reasoning` the thought it was made from where
    an answer holds several."""

    id: str
    name: str
    arguments: str
    reasoning: str | None = None


class TokenScore(NamedTuple):
    """One token as clients see it: its text and bytes, logprob, alternatives and id.

    A prompt's first token has no logprob: None, as nothing predicts it.
    """

    text: str
    data: bytes
    logprob: float | None
    alternatives: tuple["TokenScore", ...] = ()
    id: int = -1


class Echo(NamedTuple):
    """A prompt as it is told back: its text, ids, and scores where asked for."""

    text: str
    ids: tuple[int, ...]
    scores: tuple[TokenScore, ...] | None


class Usage(NamedTuple):
    """Tokens of one request, all answers together.

    Attributes:
        prompt: of the prompt, once.
        completion: sampled.
        reasoning: of them, thinking.
        cached: of the prompt, those that needed no computing.
    """

    prompt: int
    completion: int
    reasoning: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        """Prompt and completion."""
        return self.prompt + self.completion


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a request.

    Attributes:
        response_id: what the response is called; known before the call is recorded.
        index: among the answers to this request.
        content: visible text.
        reasoning: thinking text, or None.
        tool_calls: in order.
        finish: "length" also for what was cut by a deadline.
        stop: the stop text that ended it.
        scores: of all sampled tokens where asked for.
        prompt_ids, ids: everything read and sampled; of continued texts only.
        echo: the prompt, where asked for.
        usage: of this answer.
        record: what the gateway recorded of it, for those who want to know.
    """

    response_id: str
    index: int
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length", "tool_calls"]
    stop: str | None
    scores: tuple[TokenScore, ...] | None
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    echo: Echo | None = None
    usage: Usage
    record: dict[str, Any]
    created: int


class Piece(NamedTuple):
    """What a streaming client is told next of answer `index`: one of the fields is set.

    `call` begins a tool call (arguments still empty); `arguments` belong to the last one begun.
    """

    index: int
    reasoning: str = ""
    content: str = ""
    call: ToolCall | None = None
    arguments: str = ""


class Start(NamedTuple):
    """What is known of a streamed response before its first piece.

    Attributes:
        response_id: what the response is called.
        created: seconds since 1970.
        prompt_tokens: tokens of the prompt.
    """

    response_id: str
    created: int
    prompt_tokens: int


class Listener(NamedTuple):
    """Who watches an answer come; called in the event loop, must not block. `start` comes first."""

    start: Callable[[Start], None]
    piece: Callable[[Piece], None]


class Events(Protocol):
    """A streamed response in one API's events, each as (name, or None, and JSON-able data)."""

    def start(self, start: Start) -> list["Event"]: ...

    def piece(self, piece: Piece) -> list["Event"]: ...

    def end(self, answers: Sequence[Answer]) -> list["Event"]: ...

    def fail(self, error: ApiError) -> list["Event"]: ...


class Event(NamedTuple):
    """One server-sent event; `name` None sends data alone, data None ends OpenAI's streams."""

    name: str | None
    data: dict[str, Any] | None


def total_usage(answers: Sequence[Answer]) -> Usage:
    """Of one request: the prompt is counted once."""
    return Usage(
        prompt=max((a.usage.prompt for a in answers), default=0),
        completion=sum(a.usage.completion for a in answers),
        reasoning=sum(a.usage.reasoning for a in answers),
        cached=max((a.usage.cached for a in answers), default=0),
    )


def decode(data: bytes, kind: type[Any]) -> Any:
    """Read a request body.

    Raises:
        ApiError: 400, not JSON or a field of the wrong type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(f"request body: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"request body is not valid JSON: {error}") from error


def convert(body: dict[str, Any], kind: type[Any]) -> Any:
    """The same for a body that is an object already."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise invalid(f"request body: {error}") from error
