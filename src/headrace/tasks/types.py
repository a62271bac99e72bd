"""What a task service is: instances from seeds, and a rollout that an ordinary API client can run.

Task services see an API endpoint and a sandbox. They know nothing of tokens or training.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from headrace.errors import UserError
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.types import Outcome


class TaskUnavailable(Exception):
    """A task service cannot be asked now, or says what it may not; other tasks go on without it."""


class EndpointError(Exception):
    """A model's endpoint failed, and asking again did not help.

    Attributes:
        status: of its last answer; None when there was none that could be read.
        timed_out: whether it did not answer in time.
    """

    def __init__(self, message: str, *, status: int | None = None, timed_out: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.timed_out = timed_out


class TaskInstance(msgspec.Struct, frozen=True):
    """One problem. Equal seeds give equal instances.

    Attributes:
        task: service name.
        seed: what it was generated from.
        family: kind of problem, for reports.
        level: difficulty, 1 is easiest.
        min_turns: assistant turns of the reference solution (answer included).
    """

    task: str
    seed: int
    family: str
    level: int
    min_turns: int


class Endpoint(msgspec.Struct, frozen=True):
    """Where and how an agent reaches its model. The key identifies the session."""

    base_url: str
    api_key: str
    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    """Per call."""
    max_turns: int = 6
    timeout_s: float = 60.0
    """Wall clock for the whole rollout."""
    models: tuple[str, ...] = ()
    """Further models, e.g. a judge, that requests with this key may name instead of `model`."""


class RolloutResult(msgspec.Struct, frozen=True):
    """What a task service reports at the end of a rollout.

    Attributes:
        outcome: see Outcome; ENV_FAILED when the environment broke.
        rewards: components by name; "reward" is the total in [0, 1], present when outcome.scored.
        reason: one line, for people.
        detail: JSON-compatible extras for the report (e.g. commands run, expected answer).
        failure: how the rollout failed, where the service knows; also beside an OK that earned
            nothing (e.g. NO_ANSWER). TAMPERING takes the reward away.
    """

    outcome: Outcome
    rewards: dict[str, float] = {}
    reason: str = ""
    detail: dict[str, Any] = {}
    failure: FailureReason | None = None


class Demonstration(msgspec.Struct, frozen=True):
    """One scripted conversation.

    Attributes:
        messages: in OpenAI chat format, tool calls and tool results included.
        train: one flag per message: whether its tokens are to be learnt (assistant messages).
        tools: tool specifications of the conversation.
        family: kind of problem.
        level: its difficulty.
        right: whether every command or answer in it was the reference.
        reward: what the verifier says about its end, in [0, 1].
        content_id: names the problem that is asked, see `TaskService.content_id`; without it no
            demonstration trains in a run that measures, as it may show what is held out.
    """

    messages: tuple[dict[str, Any], ...]
    train: tuple[bool, ...]
    tools: list[dict[str, Any]]
    family: str
    level: int
    right: bool
    reward: float
    content_id: str = ""


def check_quality(quality: float) -> None:
    """Raise UserError unless `quality` is a probability."""
    if not 0.0 <= quality <= 1.0:
        raise UserError(f"quality is {quality}; use a probability between 0 and 1")


@runtime_checkable
class Returning(Protocol):
    """A service that may be lost and found again.

    Attributes:
        on_return: set by whoever wants to know; called in the loop when it is there again.
    """

    on_return: Callable[[], None]


class TaskService(Protocol):
    """A task: endless instances and one way to attempt them.

    What a service may have besides: `async demonstrations(count, seed, quality)` for sft stages,
    `async close()`, awaited at the end of a run, `grace_s`, seconds beyond an endpoint's timeout
    after which a rollout counts as hung, and `on_return`, see `Returning`.
    """

    name: str

    def instance(self, seed: int) -> TaskInstance:
        """The instance of `seed`. Pure and fast; may be called in any thread.

        Raises:
            TaskUnavailable: it cannot be had now (also from the three below).
        """
        ...

    def train_seed(self, index: int) -> int:
        """The `index`-th seed for training, index >= 0."""
        ...

    def evaluation_seed(self, index: int) -> int:
        """The `index`-th held-out seed; its instance is never a training instance."""
        ...

    def content_id(self, instance: TaskInstance) -> str:
        """Names what is asked in `instance`: equal for two instances exactly when the same problem
        is posed, whatever their seeds. What is held out by content is never trained on."""
        ...

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        """Attempt `instance` with the model at `endpoint` and score it.

        Exceptions other than CancelledError are environment failures, decided by the caller;
        `rollout.failures.WorkerDied` and `sandbox.types.SandboxError` are told apart from others.
        """
        ...
