"""The terminal task service: instances from seeds, rollouts with an agent, a score at the end.

It binds the other modules of this package to the `TaskService` protocol and decides which end of a
rollout is whose fault.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from headrace.errors import UserError
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.types import Outcome
from headrace.sandbox.tampering import command_signs, folder_signs
from headrace.sandbox.types import SandboxProvider
from headrace.tasks.conversation import AgentFailure, ClientPool
from headrace.tasks.options import AgentOptions
from headrace.tasks.results import storable
from headrace.tasks.terminal.agent import Transcript, run_agent
from headrace.tasks.terminal.demonstrations import perform, plan
from headrace.tasks.terminal.families import FAMILIES, select_families
from headrace.tasks.terminal.problem import AnswerGoal, Problem
from headrace.tasks.terminal.seeds import (
    LEVELS,
    choose_kind,
    content_hash,
    evaluation_seed,
    make_problem,
    train_seed,
)
from headrace.tasks.terminal.verifier import score, state_difference
from headrace.tasks.types import (
    Demonstration,
    Endpoint,
    RolloutResult,
    TaskInstance,
    check_quality,
)

_DEMONSTRATION_BASE = 1 << 32
"""Demonstrations draw training seeds from this index on, so that RL meets unseen problems."""

_MAX_ATTEMPT_COUNTS = 4096


class Latency(BaseModel):
    """An artificial, long-tailed delay before each command (lognormal)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median_s: float = Field(gt=0, le=600)
    """Median delay, seconds."""
    sigma: float = Field(default=1.0, ge=0, le=4)
    """Standard deviation of the delay's logarithm; 1.0 makes the slowest 1% ten times slower."""


class TerminalOptions(AgentOptions):
    """Options of the terminal task."""

    families: tuple[str, ...] = ()
    """Families to draw from; empty means all."""
    level_weights: tuple[float, float, float] = (0.5, 0.3, 0.2)
    """How often levels 1, 2 and 3 are drawn, relative to each other."""
    max_turns: int | None = Field(default=None, ge=1, le=100)
    """Assistant turns per rollout; None takes the endpoint's limit, else the smaller one counts."""
    latency: Latency | None = None
    """Artificial tool latency, for benchmarks; None for none."""

    @field_validator("level_weights")
    @classmethod
    def _check_weights(cls, weights: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(weights) < 0 or sum(weights) <= 0 or not all(map(math.isfinite, weights)):
            raise ValueError("use three weights of 0 or more with a positive sum")
        return weights


class TerminalTasks:
    """Procedural shell tasks, attempted by a tool-calling agent in a sandbox.

    Implements `TaskService`. One service serves many concurrent rollouts of one event loop.
    """

    name = "terminal"
    blocking = False
    """Instances and their contents are found in tenths of a millisecond."""

    def __init__(
        self, provider: SandboxProvider | None, options: TerminalOptions | None = None
    ) -> None:
        """
        Args:
            provider: where commands run; it stays the caller's to close. None: instances only.
            options: see TerminalOptions.

        Raises:
            UserError: unknown family.
        """
        self.options = options or TerminalOptions()
        self.families = select_families(self.options.families)
        self._provider = provider
        self._clients = ClientPool(self.options.request_retries)
        self._attempts: OrderedDict[int, int] = OrderedDict()

    async def close(self) -> None:
        """Close connections to endpoints. Safe to repeat."""
        await self._clients.close()

    def instance(self, seed: int) -> TaskInstance:
        """The instance of `seed`; see `train_seed` and `evaluation_seed` for which to use.

        Raises:
            UserError: negative seed.
        """
        family, level = choose_kind(seed, self.families, self.options.level_weights)
        problem = make_problem(seed, family, level)
        return TaskInstance(self.name, seed, family.name, level, problem.min_turns)

    def train_seed(self, index: int) -> int:
        """The `index`-th training seed; see `seeds`."""
        return train_seed(index)

    def evaluation_seed(self, index: int) -> int:
        """The `index`-th held-out seed; see `seeds`."""
        return evaluation_seed(index)

    def problem(self, instance: TaskInstance) -> Problem:
        """The full problem of an instance, goal and solution included.

        Raises:
            UserError: the instance names another service, an unknown family or level.
        """
        family = FAMILIES.get(instance.family)
        if instance.task != self.name or family is None or instance.level not in LEVELS:
            raise UserError(
                f"instance {instance.task}/{instance.family}/{instance.level} is not of the "
                "terminal task; make instances with TerminalTasks.instance"
            )
        return make_problem(instance.seed, family, instance.level)

    def content_id(self, instance: TaskInstance) -> str:
        """Hex digest of what an agent can see of an instance."""
        return content_hash(self.problem(instance))

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        """Attempt `instance` with the model at `endpoint` and score the end.

        Raises:
            SandboxError: the sandbox failed.
            EndpointError: the endpoint failed and retrying did not help.
            UserError: the service has no sandbox provider.
        """
        problem = self.problem(instance)
        if self.options.max_turns is not None:
            limit = min(endpoint.max_turns, self.options.max_turns)
            endpoint = msgspec.structs.replace(endpoint, max_turns=limit)
        transcript = Transcript()
        sandbox = await self._require_provider().open(problem.files)
        try:
            outcome, reason, failure = Outcome.OK, "", None
            deadline = asyncio.timeout(endpoint.timeout_s)
            try:
                async with deadline:
                    await run_agent(
                        self._clients.get(endpoint.base_url),
                        endpoint,
                        sandbox,
                        problem.instruction,
                        transcript,
                        output_limit=self.options.output_chars,
                        next_latency=self._latency_of(instance),
                    )
            except AgentFailure as fault:
                outcome, reason = Outcome.AGENT_FAILED, str(fault)
                failure = fault.reason
            except TimeoutError:
                if not deadline.expired():
                    raise
                outcome, reason = Outcome.TIMEOUT, f"no answer within {endpoint.timeout_s:g} s"
                failure = FailureReason.SESSION_TIME
            rewards = {"reward": 0.0}
            signs = command_signs(
                transcript.commands, known=f"{problem.instruction} {' '.join(problem.files)}"
            )
            if outcome is Outcome.OK:
                goal, answer = problem.goal, transcript.answer or ""
                if not answer.strip():
                    failure = FailureReason.NO_ANSWER
                if isinstance(goal, AnswerGoal):
                    rewards = score(goal, answer, None)
                    reason = "" if rewards["reward"] else f"answered {answer[:60]!r}"
                else:
                    tree = await sandbox.tree()
                    rewards = score(goal, answer, tree)
                    reason = state_difference(goal, tree) or ""
                    signs += folder_signs(tree, problem.files)
                if rewards["reward"] > 0.0:
                    failure = None  # the state of the files was the answer
        finally:
            await sandbox.close()
        detail = _detail(problem, transcript)
        if signs:
            failure, reason = FailureReason.TAMPERING, f"tampering: {signs[0]}"
            detail["tampering"] = [storable(sign) for sign in signs]
        return RolloutResult(outcome, rewards, storable(reason), detail, failure)

    async def demonstrations(self, count: int, seed: int, quality: float) -> list[Demonstration]:
        """Scripted conversations for a warm start, on training problems that RL does not use.

        Args:
            count: how many.
            seed: another seed gives other problems and other mistakes.
            quality: probability that a demonstration uses the right commands; else one command
                is a plausible wrong one. 1.0 gives demonstrations that all score 1.0.

        Raises:
            UserError: quality is no probability, or there is no sandbox provider.
            SandboxError: the sandbox failed.
        """
        check_quality(quality)
        provider = self._require_provider()
        rng = Random(f"terminal demonstrations {seed}")
        first = _DEMONSTRATION_BASE * (seed + 1)
        scripts = []
        for index in range(first, first + count):
            number = train_seed(index)
            family, level = choose_kind(number, self.families, self.options.level_weights)
            scripts.append(plan(make_problem(number, family, level), quality, rng))
        return await perform(scripts, provider, output_limit=self.options.output_chars)

    def _require_provider(self) -> SandboxProvider:
        if self._provider is None:
            raise UserError("terminal task: no sandbox provider; pass one to run commands")
        return self._provider

    def _latency_of(self, instance: TaskInstance) -> Callable[[], float] | None:
        """The delay stream of this rollout: the k-th rollout of an instance draws stream k, so
        that two runs of one workload meet the same delays."""
        latency = self.options.latency
        if latency is None:
            return None
        attempt = self._attempts.pop(instance.seed, 0)
        self._attempts[instance.seed] = attempt + 1
        if len(self._attempts) > _MAX_ATTEMPT_COUNTS:
            self._attempts.popitem(last=False)
        rng = Random(f"terminal latency {instance.seed} {attempt}")
        return lambda: rng.lognormvariate(math.log(latency.median_s), latency.sigma)


def _detail(problem: Problem, transcript: Transcript) -> dict[str, Any]:
    """What a report shows of a rollout."""
    goal = problem.goal
    return {
        "instruction": problem.instruction,
        "commands": transcript.commands,
        "answer": None if transcript.answer is None else storable(transcript.answer),
        "expected": goal.expected if isinstance(goal, AnswerGoal) else None,
        "turns": transcript.turns,
        "tool_errors": transcript.tool_errors,
    }
