"""The bodies of the engine's HTTP surface: what may be sent, what comes back, and their limits.

These models are the OpenAPI document as well as the checks, so that neither can promise what the
other does not do. They are turned into the engine's own types here and nowhere else.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from headrace.engine.types import Alternatives, GenerationRequest, GenerationResult, SamplingParams
from headrace.rollout.types import FinishReason

MAX_OUTPUTS = 64
"""Most outputs of one prompt."""
MAX_TIMEOUT_S = 3600.0
_MAX_ID = 2**31 - 1
_SHOWN_PROBLEMS = 3

TokenId = Annotated[int, Field(ge=0, le=_MAX_ID)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Pair = tuple[int, float | None]
"""A token id and its raw logprob."""


class _Body(BaseModel):
    """What clients send: JSON types as they are, nothing unknown, no NaN or Infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class Sampling(_Body):
    """How to sample; see docs/engine.md for the order in which these apply."""

    max_tokens: int = Field(ge=1, le=_MAX_ID, description="Most tokens to sample.")
    temperature: float = Field(1.0, ge=0, le=1e6, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest ids of this mass.")
    top_k: int = Field(0, ge=0, le=_MAX_ID, description="Keep the k likeliest ids; 0 keeps all.")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Fixes the draws; null takes a random one."
    )
    stop_ids: tuple[TokenId, ...] = Field((), description="Ids that end the output, kept in it.")
    min_p: float = Field(0.0, ge=0, le=1, description="Least share of the likeliest id's odds.")
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="1 is off.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="0 is off.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="0 is off.")
    logit_bias: dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ] = Field(
        {},
        description="Token id -> what is added to its logit.",
        json_schema_extra={"additionalProperties": False},
    )
    min_tokens: int = Field(0, ge=0, description="No stop before this many; <= max_tokens.")
    logprobs: int = Field(0, ge=0, le=20, description="Alternatives per sampled token.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=20, description="Score the prompt, with this many alternatives per token."
    )
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        (), max_length=16, description="Texts of at most 256 bytes that end the output."
    )
    grammar: str = Field(
        "", max_length=65536, description="What the output has to spell, as llguidance's Lark."
    )
    grammar_after: TokenId | None = Field(None, description="The id behind which that begins.")

    def params(self) -> SamplingParams:
        """The engine's type of the same."""
        values = dict(self)
        values["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams(**values)


class GenerateBody(_Body):
    """A prompt and what to do with it."""

    prompt_ids: Annotated[
        tuple[TokenId, ...],
        FailFast(),
        Field(min_length=1, description="Token ids; fewer than the engine's context."),
    ]
    sampling: Sampling
    n: int = Field(1, ge=1, le=MAX_OUTPUTS, description="Outputs; the prompt is computed once.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    id: Name | None = Field(None, description="For /abort; must not be in use. Made up if null.")
    session: str = Field("", max_length=256, description="Requests of one session share its turn.")
    priority: int = Field(0, ge=-_MAX_ID, le=_MAX_ID, description="Higher goes first.")
    timeout_s: float = Field(
        60.0, gt=0, le=MAX_TIMEOUT_S, description='Seconds until it ends with "deadline".'
    )

    def request(self, request_id: str) -> GenerationRequest:
        """The engine's type of the same, for one output."""
        return GenerationRequest(
            id=request_id,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling.params(),
            timeout_s=self.timeout_s,
            session=self.session,
            priority=self.priority,
        )


class WeightsBody(_Body):
    """Weights to switch to."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="A checkpoint directory, or what a trainer published, on the engine's machine."
    )
    version: int = Field(ge=0, lt=2**63, description="Stamped on what they sample.")
    policy: Literal["continue", "requeue"] = Field(
        "continue", description="Running requests go on over the new weights, or start again."
    )


class AbortBody(_Body):
    """Which request to end."""

    id: Name


class SpanPart(BaseModel):
    """Whose tokens start <= index < end of an output are."""

    start: int
    end: int
    weight_version: int
    newest_version: int | None = Field(
        None, description="If set, any version from weight_version to this one."
    )
    engine_id: str


class Output(BaseModel):
    """One sampled output."""

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...] = Field(
        description="One per id, of the distribution it was drawn from."
    )
    raw_logprobs: tuple[float | None, ...] = Field(
        description="One per id, of the model's own distribution; empty if unknown."
    )
    spans: tuple[SpanPart, ...] = Field(description="Without gaps from 0 to the number of ids.")
    finish_reason: FinishReason
    stop: str | None = Field(description="The text of sampling.stop that ended it.")
    alternatives: tuple[tuple[Pair, ...], ...] = Field(
        description="Per id, [id, raw logprob] of the likeliest; empty unless asked for."
    )
    reused_tokens: int = Field(description="Prompt tokens that needed no computation.")
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    queue_s: float
    total_s: float


class GenerateAnswer(BaseModel):
    """Everything sampled for one body, outputs by index."""

    id: str
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[float | None, ...] | None = Field(
        description="Raw, one per prompt token, the first null; null unless asked for."
    )
    prompt_alternatives: tuple[tuple[Pair, ...], ...] | None = Field(
        description="Per prompt token; null unless asked for."
    )


class TokenEvent(BaseModel):
    """Data of the event `token`: what an output grew by, of one weight version."""

    index: int
    ids: list[int]
    logprobs: list[float | None]
    raw_logprobs: list[float | None]
    weight_version: int


class RestartEvent(BaseModel):
    """Data of the event `restart`: forget the tokens of this output; it begins again."""

    index: int


class WeightsAnswer(BaseModel):
    """The weights in use."""

    version: int
    updating: bool = Field(description="Whether an update asked for here is under way.")
    updates: int
    last_update_pause_s: float = Field(description="Seconds in which no request moved.")
    update_bytes: int = Field(description="Bytes that all updates wrote.")
    update_tensors: int
    requests_restarted: int


class AbortAnswer(BaseModel):
    """Whether the request was open here."""

    id: str
    aborted: bool


class ReplicaAnswer(BaseModel):
    """One of several engines that answer as one."""

    name: str
    state: Literal["starting", "serving", "leaving"]
    version: int = Field(description="Of its weights; -1 before it first serves.")
    sessions: int = Field(description="Sessions whose requests go there.")
    requests: int = Field(description="Requests in flight there.")
    restarts: int
    last_fault: str | None = Field(description="Why it was last ended.")


class HealthAnswer(BaseModel):
    """How the engine is. Counts are the last that were heard of."""

    status: Literal["ok", "updating", "unresponsive", "closed"]
    weight_version: int
    max_context: int = Field(description="Most tokens of prompt + output.")
    running: int
    waiting: int
    restarts: int = Field(description="Times the engine's process died and was replaced.")
    replicas: list[ReplicaAnswer] | None = Field(
        None, description="Each of several engines; null if there is one."
    )


class Problem(BaseModel):
    """What is wrong and what to do about it."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: Problem


BODIES: tuple[type[BaseModel], ...] = (GenerateBody, WeightsBody, AbortBody)
EVENTS: tuple[type[BaseModel], ...] = (TokenEvent, RestartEvent)


def describe(error: ValidationError) -> str:
    """The first few problems on one line: field, what is expected, what was sent."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False)[:_SHOWN_PROBLEMS]:
        where = ".".join(str(part) for part in problem["loc"]) or "body"
        lines.append(f"{where}: {problem['msg']}, not {_shorten(problem['input'])}")
    more = error.error_count() - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def is_unreadable(error: ValidationError) -> bool:
    """Whether the body is no JSON at all, rather than JSON that means nothing here."""
    return error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid"


def _shorten(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def answer(request_id: str, results: list[GenerationResult]) -> GenerateAnswer:
    """What is sent for the results of one body, one per output."""
    first = results[0]
    scored = bool(first.prompt_logprobs)
    return GenerateAnswer(
        id=request_id,
        outputs=tuple(_output(index, result) for index, result in enumerate(results)),
        prompt_logprobs=finite(first.prompt_logprobs) if scored else None,
        prompt_alternatives=_pairs(first.prompt_alternatives)
        if first.prompt_alternatives
        else None,
    )


def _output(index: int, result: GenerationResult) -> Output:
    spans, ids, logprobs = [], [], []
    for span in result.spans:
        start = len(ids)
        ids += span.ids
        logprobs += span.logprobs
        spans.append(
            SpanPart(
                start=start,
                end=len(ids),
                weight_version=span.weight_version,
                newest_version=span.newest_version,
                engine_id=span.engine_id,
            )
        )
    return Output(
        index=index,
        ids=tuple(ids),
        logprobs=finite(logprobs),
        raw_logprobs=finite(result.raw_logprobs),
        spans=tuple(spans),
        finish_reason=result.finish_reason,
        stop=result.stop,
        alternatives=_pairs(result.alternatives),
        reused_tokens=result.reused_tokens,
        drafted_tokens=result.drafted_tokens,
        accepted_tokens=result.accepted_tokens,
        preemptions=result.preemptions,
        queue_s=result.queue_s,
        total_s=result.total_s,
    )


def finite(values: tuple[float, ...] | list[float]) -> tuple[float | None, ...]:
    """JSON has no NaN and no Infinity: null stands for them."""
    return tuple(value if math.isfinite(value) else None for value in values)


def _pairs(positions: tuple[Alternatives, ...]) -> tuple[tuple[Pair, ...], ...]:
    return tuple(
        tuple((token, logprob if math.isfinite(logprob) else None) for token, logprob in position)
        for position in positions
    )
