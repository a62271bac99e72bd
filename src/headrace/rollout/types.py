"""The evidence model: what the gateway records and what everything downstream derives from it.

Evidence (`Span`, `Call`, `Session`) is immutable and append-only; a `Segment` is derived from it
for the trainer and is never stored. Nothing here does I/O. Law numbers (L1..L14) refer to
docs/architecture.md.
"""

from enum import StrEnum
from typing import Any

import msgspec

from headrace.rollout.failures.reasons import FailureReason


class FinishReason(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    """A stop id, or the token that completed a stop text, is the last id of the output."""
    LENGTH = "length"
    """max_tokens or the model's context was reached."""
    ABORTED = "aborted"
    """The caller asked for it."""
    DEADLINE = "deadline"
    """The request's own deadline passed."""


class ParseState(StrEnum):
    """How well a completion could be read as an assistant message (law L13: one of these)."""

    OK = "ok"
    MALFORMED = "malformed"
    """Sampled to its stop id, but a tool call in it cannot be read. Raw text is kept."""
    TRUNCATED = "truncated"
    """Cut by length, deadline or abort."""


class Outcome(StrEnum):
    """How a session ended. Only OK, AGENT_FAILED and TIMEOUT carry a reward (law L6)."""

    OK = "ok"
    """The agent finished and the verifier scored it."""
    AGENT_FAILED = "agent_failed"
    """The agent's own fault (too many turns, context overflow, sandbox killed by its command)."""
    TIMEOUT = "timeout"
    """The agent used up its wall-clock limit."""
    ENV_FAILED = "env_failed"
    """The environment's fault. Never a reward of 0: excluded before the baseline is computed."""
    CANCELLED = "cancelled"
    """The system's decision (stage over, crash, stale group dropped)."""

    @property
    def scored(self) -> bool:
        """Whether a reward exists and may enter a baseline."""
        return self in (Outcome.OK, Outcome.AGENT_FAILED, Outcome.TIMEOUT)


class DropReason(StrEnum):
    """Why sampled tokens did not train (law L2: sampled = trained + sum over these)."""

    EVALUATION = "evaluation"
    """Sampled for measurement, never for training."""
    ENV_FAILED = "env_failed"
    CANCELLED = "cancelled"
    STALE = "stale"
    """The trajectory's oldest version lagged more than tau when its batch was cut (law L7)."""
    NO_SIGNAL = "no_signal"
    """Every valid rollout of the group has the same reward, so every advantage is zero."""
    GROUP_INVALID = "group_invalid"
    """At most half of the group was valid (paper section 4.1)."""
    EXCLUDED = "excluded"
    """It has a reward, and a rule of the recipe leaves rollouts that failed like it out."""
    RETRIED = "retried"
    """It has a reward, and a rule of the recipe had its place in the group attempted again."""
    FORKED = "forked"
    """The call lies on a branch that is not trained."""
    STAGE_ENDED = "stage_ended"
    """The stage reached its budget before this trajectory was needed."""
    TOO_LONG = "too_long"
    """The segment exceeds the trainer's sequence limit."""
    OTHER_MODEL = "other_model"
    """Sampled by a model beside the one that learns, e.g. a teacher or a judge."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of sampled tokens that one weight version of one engine produced (law L4).

    Attributes:
        ids: sampled token ids, length n >= 1.
        logprobs: log-probability of each id under the distribution it was sampled from, length n.
        weight_version: version of the weights, >= 0; where only bounds are known, the oldest that
            any of these tokens may be of. Staleness counts from it.
        engine_id: which engine process sampled it.
        newest_version: None where weight_version is exact. Otherwise each token is of some version
            from weight_version to this one, and the engine did not say which.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    engine_id: str
    newest_version: int | None = None

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"Span: {len(self.ids)} ids but {len(self.logprobs)} logprobs")
        if not self.ids:
            raise ValueError("Span: empty; a span holds at least one sampled token")
        if self.weight_version < 0:
            raise ValueError(f"Span: weight_version {self.weight_version} is negative")
        if self.newest_version is not None and self.newest_version <= self.weight_version:
            raise ValueError(
                f"Span: newest_version {self.newest_version} is not above weight_version "
                f"{self.weight_version}; leave it out where the version is exact"
            )


class Call(msgspec.Struct, frozen=True):
    """One generation request and everything it produced.

    The full prompt is `path(parent) + prompt_delta` where `path(call)` is the call's full prompt
    followed by its sampled ids; with no parent the full prompt is `prompt_delta` (law L1).

    Attributes:
        id: unique within the run.
        session_id: the session it belongs to.
        index: position in the session, 0-based, gapless.
        parent_id: the call whose path is a true prefix of this prompt, or None for a fork or root.
        fork_reason: why there is no parent although the session already had calls; None otherwise.
        idempotency_key: the client's retry key, if any; one key generates once.
        messages: what the client sent, as JSON-compatible objects; calls of one session may share
            them, so they are never changed.
        tools: OpenAI tool specifications the client sent.
        renderer_id: which renderer turned messages into tokens.
        prompt_delta: ids the renderer added after the parent's path.
        spans: sampled output, in order.
        finish_reason: why sampling stopped.
        parse_state: how the output parsed.
        response: the assistant message returned to the client (JSON-compatible), raw text kept.
        started_at: unix time, seconds.
        finished_at: unix time, seconds.
        model: None for the model that learns; else the name of the one beside it that was asked.
            Its tokens never train, its versions are its own, and its calls continue its own only.
    """

    id: str
    session_id: str
    index: int
    parent_id: str | None
    fork_reason: str | None
    idempotency_key: str | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    renderer_id: str
    prompt_delta: tuple[int, ...]
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    parse_state: ParseState
    response: dict[str, Any]
    started_at: float
    finished_at: float
    model: str | None = None

    @property
    def output_ids(self) -> tuple[int, ...]:
        """All sampled ids, in order."""
        return tuple(i for span in self.spans for i in span.ids)


class Session(msgspec.Struct, frozen=True):
    """One rollout: an append-only list of calls and how it ended.

    Attributes:
        id: unique within the run.
        stage: name of the recipe stage.
        purpose: "train", or "eval:LABEL" for evaluation (never trained).
        task: task service name, e.g. "terminal".
        instance: the task instance as JSON-compatible object (seed, family, level ...).
        group_id: rollouts of one instance that share a baseline.
        outcome: None while open.
        reason: free text beside the outcome (exception, limit ...).
        rewards: reward components by name; the total is under "reward".
        calls: in index order.
        failure: how it failed; None for one that did not.
    """

    id: str
    stage: str
    purpose: str
    task: str
    instance: dict[str, Any]
    group_id: str
    outcome: Outcome | None = None
    reason: str = ""
    rewards: dict[str, float] = {}
    calls: tuple[Call, ...] = ()
    failure: FailureReason | None = None

    @property
    def policy_calls(self) -> tuple[Call, ...]:
        """The calls of the model that learns, in order."""
        return tuple(call for call in self.calls if call.model is None)


class SessionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session may use, each of its models for itself; None is no limit.

    Attributes:
        calls: calls recorded.
        sampled_tokens: tokens sampled in all calls together; a call is cut where they end.
        context: most tokens of prompt and output of one call.
        wall_s: seconds until its key stops working.
        concurrent: calls in flight at once.
    """

    calls: int = 256
    sampled_tokens: int | None = None
    context: int | None = None
    wall_s: float | None = None
    concurrent: int = 64


LIMIT_WORDS = {
    "session_call_limit": "it made all the calls it may",
    "session_token_limit": "it sampled all the tokens it may",
    "context_length_exceeded": "the conversation no longer fits",
    "session_expired": "its time is up",
}
"""In words, the codes of refusals whose reason are a session's limits or the model's context."""


class Segment(msgspec.Struct, frozen=True):
    """One training sequence: a root-to-leaf path of a session's calls. Derived, never stored.

    All four lists have one length T (law L5).

    Attributes:
        session_id: where it came from.
        ids: token ids as the engine read and wrote them (law L1), length T.
        train_mask: True exactly on sampled tokens this segment owns (laws L2 and L3).
        logprobs: rollout logprob on sampled tokens, 0.0 elsewhere.
        versions: weight version on sampled tokens (the oldest possible one, see `Span`), -1
            elsewhere.
        call_ids: the calls whose sampled tokens this segment owns, in path order.
        newest_versions: the newest possible one, likewise; empty when all versions are exact.
    """

    session_id: str
    ids: tuple[int, ...]
    train_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    call_ids: tuple[str, ...] = ()
    newest_versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.ids)
        if len(self.newest_versions) not in (0, n):
            raise ValueError(f"Segment: {n} ids but {len(self.newest_versions)} newest_versions")
        for name in ("train_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"Segment: {n} ids but {len(getattr(self, name))} {name}")
        for masked, version in zip(self.train_mask, self.versions, strict=True):
            if masked and version < 0:
                raise ValueError("Segment: a trained token has no weight version")
