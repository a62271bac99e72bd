"""The reasoning task service: problems of reasoning-gym, an agent, the families' own scorers.

It binds the other modules of this package to the `TaskService` protocol and decides which end of a
rollout is whose fault. Worker processes start on first use and end with `close`.
"""

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
from pydantic import Field, field_validator

from headrace.errors import UserError
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.types import Outcome
from headrace.sandbox.tampering import command_signs
from headrace.sandbox.types import SandboxProvider
from headrace.tasks.conversation import AgentFailure, ClientPool
from headrace.tasks.options import AgentOptions, OutputChars
from headrace.tasks.reasoning.agent import (
    TOOL_PROMPT,
    ToolLimits,
    Transcript,
    opening_messages,
    run_agent,
)
from headrace.tasks.reasoning.demonstrations import Script, program_of, run_programs, write_down
from headrace.tasks.reasoning.families import prompt_text, select_families
from headrace.tasks.reasoning.problems import (
    Problem,
    Problems,
    evaluation_seed,
    family_of,
    train_seed,
)
from headrace.tasks.reasoning.process import WorkerProcess
from headrace.tasks.reasoning.verifier import Verdict, Verifier, find_answer
from headrace.tasks.results import storable
from headrace.tasks.types import (
    Demonstration,
    Endpoint,
    RolloutResult,
    TaskInstance,
    check_quality,
)

_DEMONSTRATION_BASE = 1 << 32
"""Demonstrations draw training seeds from this index on, so that RL meets unseen problems."""
_OTHER_ANSWERS = 20
"""So many other problems are looked at for a wrong answer."""


class ReasoningOptions(AgentOptions):
    """Options of the reasoning task."""

    families: Mapping[str, Mapping[str, Any]] = {"chain_sum": {}, "basic_arithmetic": {}, "gcd": {}}
    """Families to draw from: a list of names, or a table of settings per name. A family's settings
    are those of its configuration in reasoning-gym, and `weight`, how often it is drawn relative to
    the others (1)."""
    prompt: str = "direct"
    """Name of one of reasoning-gym's system prompts: "direct", "simple", "default",
    "chain_of_draft" or "DeepSeekZero". All ask for the answer between answer tags."""
    system_prompt: str | None = None
    """Text of a system prompt instead; "" sends none."""
    threshold: float = Field(default=1.0, gt=0, le=1)
    """The reward is 1 for scores from here on, else 0."""
    partial: bool = False
    """The reward is the scorer's own number instead, which many families give for parts."""
    python_tool: bool = False
    """Offer a tool that runs Python in the sandbox."""
    tool_calls: int = Field(default=3, ge=1, le=100)
    """Programs a rollout may run; it has one turn more than that to answer."""
    tool_seconds: float = Field(default=5.0, gt=0, le=600)
    """Wall clock per program; the sandbox's own limits hold besides."""
    output_chars: OutputChars = 200
    """Characters of a program's output that the model sees: the last ones."""
    score_seconds: float = Field(default=10.0, gt=0, le=600)
    """Time a scorer may take for one answer; an answer that needs more scores 0."""

    @field_validator("families", mode="before")
    @classmethod
    def _name_families(cls, families: Any) -> Any:
        if isinstance(families, list | tuple):
            if len(set(map(str, families))) != len(families):
                raise ValueError("repeats a name; name each family once")
            return {name: {} for name in families}
        return families


class ReasoningTasks:
    """Problems of reasoning-gym, answered in one turn or with Python in between.

    Implements `TaskService`. One service serves many concurrent rollouts of one event loop.
    """

    name = "reasoning"

    def __init__(
        self, provider: SandboxProvider | None, options: ReasoningOptions | None = None
    ) -> None:
        """
        Args:
            provider: where programs run; it stays the caller's to close. None: no tool.
            options: see ReasoningOptions.

        Raises:
            UserError: reasoning-gym is missing, or an unknown family, setting or prompt.
        """
        self.options = options or ReasoningOptions()
        self.families = select_families(self.options.families)
        self.system = self._system_prompt()
        self._provider = provider
        self._problems = Problems(self.families)
        self._verifier = Verifier(
            WorkerProcess([(f.name, dict(f.settings)) for f in self.families]),
            self.options.score_seconds,
        )
        self._clients = ClientPool(self.options.request_retries)
        self._tool = ToolLimits(
            self.options.tool_calls, self.options.tool_seconds, self.options.output_chars
        )

    async def close(self) -> None:
        """Close connections to endpoints and end the worker processes. Safe to repeat."""
        await self._clients.close()
        await asyncio.to_thread(self._problems.close)
        await asyncio.to_thread(self._verifier.close)

    def instance(self, seed: int) -> TaskInstance:
        """The instance of `seed`; see `train_seed` and `evaluation_seed` for which to use.

        Raises:
            UserError: negative seed.
        """
        return TaskInstance(self.name, seed, family_of(seed, self.families).name, 1, 1)

    def train_seed(self, index: int) -> int:
        """The `index`-th training seed; see `problems`."""
        return train_seed(index)

    def evaluation_seed(self, index: int) -> int:
        """The `index`-th held-out seed; see `problems`."""
        return evaluation_seed(index)

    def problem(self, instance: TaskInstance) -> Problem:
        """The full problem of an instance, answer included. Blocks while it is made.

        Raises:
            UserError: the instance is not this task's, or its family has too few problems.
            WorkerLost: the process that makes problems died or hangs.
        """
        known = {family.name for family in self.families}
        if instance.task != self.name or instance.family not in known:
            raise UserError(
                f"instance {instance.task}/{instance.family} is not of this reasoning task; make "
                "instances with ReasoningTasks.instance"
            )
        return self._problems.get(instance.seed, instance.family)

    def content_id(self, instance: TaskInstance) -> str:
        """Hex digest of question and answer. Blocks while the problem is made."""
        return self.problem(instance).content_id

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        """Attempt `instance` with the model at `endpoint` and score its answer.

        Raises:
            SandboxError: the sandbox failed.
            WorkerLost: a worker process cannot be started.
            EndpointError: the endpoint failed and retrying did not help.
            UserError: the tool is on and the service has no sandbox provider.
        """
        problem = await asyncio.to_thread(self.problem, instance)
        turns = 1 + self.options.tool_calls if self.options.python_tool else 1
        limit = min(endpoint.max_turns, turns)
        endpoint = msgspec.structs.replace(endpoint, max_turns=limit)
        transcript = Transcript()
        outcome, reason, failure = Outcome.OK, "", None
        sandbox = await self._require_provider().open({}) if self.options.python_tool else None
        deadline = asyncio.timeout(endpoint.timeout_s)
        try:
            async with deadline:
                await run_agent(
                    self._clients.get(endpoint.base_url),
                    endpoint,
                    sandbox,
                    opening_messages(self.system, problem.question),
                    transcript,
                    self._tool,
                )
        except AgentFailure as fault:
            outcome, reason = Outcome.AGENT_FAILED, str(fault)
            failure = fault.reason
        except TimeoutError:
            if not deadline.expired():
                raise
            outcome, reason = Outcome.TIMEOUT, f"no answer within {endpoint.timeout_s:g} s"
            failure = FailureReason.SESSION_TIME
        finally:
            if sandbox is not None:
                await sandbox.close()
        rewards, answer = {"reward": 0.0}, None
        if outcome is Outcome.OK:
            answer = find_answer(transcript.message or "")
            verdict = Verdict(0.0, "no answer between answer tags")
            if answer is not None:
                verdict = await asyncio.to_thread(self._verifier.score, problem, answer)
            rewards = {
                "reward": self._reward(verdict.score),
                "score": verdict.score,
                "format": float(answer is not None),
            }
            if rewards["reward"] < 1.0:
                reason = verdict.reason or f"answered {(answer or '')[:60]!r}"
            if answer is None:
                failure = FailureReason.NO_ANSWER
        detail: dict[str, Any] = {
            "instruction": problem.question,
            "programs": [storable(program) for program in transcript.programs],
            "answer": None if answer is None else storable(answer),
            "expected": problem.answer,
            "turns": transcript.turns,
            "tool_errors": transcript.tool_errors,
        }
        signs = command_signs(transcript.programs, known=problem.question)
        if signs:
            failure, reason = FailureReason.TAMPERING, f"tampering: {signs[0]}"
            detail["tampering"] = [storable(sign) for sign in signs]
        return RolloutResult(outcome, rewards, storable(reason), detail, failure)

    async def demonstrations(self, count: int, seed: int, quality: float) -> list[Demonstration]:
        """Scripted conversations for a warm start, on training problems that RL does not use.

        With the Python tool, families that a line of Python solves are shown with it.

        Args:
            count: how many.
            seed: another seed gives other problems and other mistakes.
            quality: probability that a demonstration uses the right answer or program; else it is
                another problem's. 1.0 gives demonstrations that all score 1.0.

        Raises:
            UserError: quality is no probability, no family has known answers, or the tool is on
                and there is no sandbox provider.
            SandboxError: the sandbox failed.
        """
        check_quality(quality)
        scripts = await asyncio.to_thread(self._plan, count, seed, quality)
        typed = await self._typed(scripts)

        def score(problem: Problem, answer: str) -> float:
            return self._reward(self._verifier.score(problem, answer).score)

        def write() -> list[Demonstration]:
            return [
                write_down(
                    script,
                    self.system,
                    typed.get(i),
                    output_chars=self.options.output_chars,
                    tools=self.options.python_tool,
                    score=score,
                )
                for i, script in enumerate(scripts)
            ]

        return await asyncio.to_thread(write)

    def _plan(self, count: int, seed: int, quality: float) -> list[Script]:
        rng = Random(f"reasoning demonstrations {seed}")
        first = _DEMONSTRATION_BASE * (seed + 1)
        shown = [f for f in self.families if self._at(first, f.name).answer is not None]
        if not shown:
            raise UserError(
                "reasoning demonstrations: none of the families "
                f"{', '.join(f.name for f in self.families)} tells a right answer; add one that "
                "does, or leave the sft stage out"
            )
        scripts = []
        for index in range(first, first + count):
            problem = self._at(index, family_of(train_seed(index), shown).name)
            right = rng.random() < quality
            scripts.append(Script(problem, problem if right else self._other(problem, rng)))
        return scripts

    def _at(self, index: int, family: str) -> Problem:
        return self._problems.get(train_seed(index), family)

    def _other(self, problem: Problem, rng: Random) -> Problem:
        """Another problem of the family whose answer is not right here."""
        for _ in range(_OTHER_ANSWERS):
            other = self._at(_DEMONSTRATION_BASE + rng.randrange(1 << 16), problem.family)
            if other.answer is None or other.answer == problem.answer:
                continue
            if self._reward(self._verifier.score(problem, other.answer).score) < 1.0:
                return other
        return problem  # a family in which every answer is right has no mistakes to show

    async def _typed(self, scripts: list[Script]) -> dict[int, tuple[str, str]]:
        """Program and output of every script that uses the tool, by position."""
        if not self.options.python_tool:
            return {}
        programs = {
            i: code for i, s in enumerate(scripts) if (code := program_of(s.model)) is not None
        }
        outputs = await run_programs(list(programs.values()), self._require_provider())
        return {i: (programs[i], out) for i, out in zip(programs, outputs, strict=True)}

    def _reward(self, score: float) -> float:
        return score if self.options.partial else float(score >= self.options.threshold)

    def _system_prompt(self) -> str:
        if self.options.system_prompt is not None:
            return self.options.system_prompt
        text = prompt_text(self.options.prompt)
        return f"{text}\n{TOOL_PROMPT}" if self.options.python_tool else text

    def _require_provider(self) -> SandboxProvider:
        if self._provider is None:
            raise UserError("reasoning task: python_tool needs a sandbox provider; pass one")
        return self._provider
