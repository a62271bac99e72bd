"""A tiny run that measures beside training, driven by a scripted task. Used by test_loop_run.py; as
a program, `python loop_run.py CHECKPOINT RUN_DIR` runs until it kills itself in the middle of the
first evaluation, when newer weights are out already.

Rewards alternate, so that every group has signal, and half of the held-out instances always
succeed, so that no evaluation improves on the first. Training keeps about two
updates ahead of the evaluations.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from headrace import run as run_module
from headrace import system as system_module
from headrace.recipe import Recipe
from headrace.rollout.types import Outcome
from headrace.run import run_recipe
from headrace.system import System
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from small_runs import ChatTask, small_recipe, use_tasks

GROUP, GROUPS, INSTANCES = 4, 2, 4
KILLED_AT = 2
"""Evaluation rollouts that end before the kill."""
PATIENCE_S = 400.0


def recipe_of(checkpoint: Path) -> Recipe:
    return small_recipe(
        checkpoint,
        {
            "kind": "agentic_rl",
            "name": "rl",
            "task": "chat",
            "mode": "one_step_off",
            "batch_invariant": True,
            "updates": 12,
            "group_size": GROUP,
            "groups_per_batch": GROUPS,
            "concurrency": 8,
            "evaluate": False,
            "learning_rate": 1e-3,
            "result": "best",
            "evaluation": {"every": 1, "instances": INSTANCES, "concurrency": 1},
            "stop": {"patience": 2},
        },
        engine={"max_running": 8, "max_context": 128, "deterministic": True},
        evaluation={"task": "chat", "instances": INSTANCES + 2, "before": False},
    )


class Chat(ChatTask):
    """One turn of a few tokens; two in evaluations, the first one's with newer weights in between.

    Args:
        kill: end the process in the middle of the first evaluation.
        resumed: go on where a killed process was, after two updates.
    """

    def __init__(self, *, kill: bool = False, resumed: bool = False) -> None:
        self.kill = kill
        self.resumed = resumed
        self.system: System | None = None
        self.trained = 0
        self.measured = KILLED_AT if resumed else 0
        self.finished = asyncio.Event()

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        held_out = instance.seed < 0
        if not held_out:
            number = self.trained
            self.trained += 1
            await self.wait_for_evaluations(number // (GROUP * GROUPS))
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for turn in range(1 + held_out):
                if turn and self.measured < INSTANCES and not self.resumed:
                    await self.wait_for_newer_weights()
                    if self.kill and self.measured == KILLED_AT:
                        os.kill(os.getpid(), signal.SIGKILL)
                await client.chat.completions.create(
                    model=endpoint.model,
                    messages=[{"role": "user", "content": f"hello {instance.seed} {turn}"}],
                    max_tokens=6,
                )
        if not held_out:
            return RolloutResult(Outcome.OK, {"reward": float(number % 2)})
        self.measured += 1
        self.finished.set()
        return RolloutResult(Outcome.OK, {"reward": float(instance.seed % 2)})

    async def wait_for_evaluations(self, batch: int) -> None:
        """Batch n (from 0) is generated after n - 2 evaluations: update n - 1 is published then,
        and of those before it, all but the last were measured. Before a kill there are three.
        """
        needed = (batch + 2 * self.resumed - 2) * INSTANCES
        async with asyncio.timeout(PATIENCE_S):
            while self.measured < needed or (self.kill and batch > 2):
                self.finished.clear()
                await self.finished.wait()

    async def wait_for_newer_weights(self) -> None:
        assert self.system is not None
        async with asyncio.timeout(PATIENCE_S):
            while self.system.engine.weight_version < 3:  # the stage begins with 1
                await self.system.engine.stats()  # answered between two steps of the engine


@contextlib.contextmanager
def scripted(task: Chat, replace: Any) -> Any:
    """The task in place of every other one; `replace(owner, name, value)` does it."""

    @contextlib.asynccontextmanager
    async def open_system(recipe: Any, **options: Any) -> AsyncIterator[System]:
        async with system_module.open_system(recipe, **options) as opened:
            task.system = opened
            yield opened

    replace(run_module, "open_system", open_system)
    use_tasks(replace, {"chat": task})
    yield


if __name__ == "__main__":
    with scripted(Chat(kill=True), setattr):
        run_recipe(recipe_of(Path(sys.argv[1])), Path(sys.argv[2]), resume=False, no_isolation=True)
