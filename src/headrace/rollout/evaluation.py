"""Held-out measurement: one rollout per instance, the same instances every time.

Evaluation rollouts are recorded like all others, with a purpose that can never train. An evaluation
that was interrupted continues: instances already attempted keep their result.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.rollout.naming import rollout_seed, session_name
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import RolloutRunner, Ticket
from headrace.tasks.types import TaskInstance

STAGE = "evaluation"
"""Under this stage name the ledger keeps evaluation rollouts."""


async def evaluate(
    label: str,
    instances: Sequence[TaskInstance],
    *,
    runner: RolloutRunner,
    ledger: Ledger,
    temperature: float,
    concurrency: int,
    progress: Callable[[float], None],
    seed: int = 0,
) -> dict[str, Any]:
    """Attempt every instance once and count.

    Args:
        label: unique in the run, e.g. "rl" or "rl greedy".
        instances: what to attempt.
        temperature: sampling temperature; 0 is greedy.
        concurrency: rollouts in flight.
        progress: called with the share done.
        seed: of the recipe; with label and instance it decides what is sampled.

    Returns:
        {"task", "n", "success" (share), "ok", "temperature", "families" {name: [ok, n]},
        "multi_turn" [ok, n] of instances that need three or more turns, "instances" {seed: 0 or 1},
        "env_failed", "wall_s"}. Environment failures count in neither n nor ok (law L6).
    """
    started = time.monotonic()
    slots = asyncio.Semaphore(concurrency)
    done = 0

    async def attempt(instance: TaskInstance) -> float | None:
        nonlocal done
        async with slots:
            reward = await _attempt(label, instance, runner, ledger, temperature, seed)
        done += 1
        progress(done / len(instances))
        return reward

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(attempt(instance)) for instance in instances]
    rewards = [task.result() for task in running]
    families: dict[str, list[int]] = {}
    multi_turn = [0, 0]
    solved: dict[str, int] = {}
    for instance, reward in zip(instances, rewards, strict=True):
        if reward is None:
            continue
        ok = int(reward >= 1.0)
        solved[str(instance.seed)] = ok
        counters = [families.setdefault(instance.family, [0, 0])]
        if instance.min_turns >= 3:
            counters.append(multi_turn)
        for counter in counters:
            counter[0] += ok
            counter[1] += 1
    n, ok = len(solved), sum(solved.values())
    return {
        "task": instances[0].task,
        "n": n,
        "ok": ok,
        "success": ok / n if n else 0.0,
        "temperature": temperature,
        "families": dict(sorted(families.items())),
        "multi_turn": multi_turn,
        "instances": solved,
        "env_failed": len(instances) - n,
        "wall_s": time.monotonic() - started,
    }


async def _attempt(
    label: str,
    instance: TaskInstance,
    runner: RolloutRunner,
    ledger: Ledger,
    temperature: float,
    seed: int,
) -> float | None:
    """The reward of one instance; None after an environment failure."""
    group_id = f"eval-{label.replace(' ', '-')}-{instance.task}-{instance.seed}"
    before = ledger.rollouts(group_id)
    if before:
        return before[0].reward if before[0].outcome.scored else None
    ticket = Ticket(
        session_id=session_name(group_id, 0, ledger.attempts(group_id)),
        group_id=group_id,
        stage=STAGE,
        purpose=f"eval:{label}",
        instance=instance,
        temperature=temperature,
        seed=rollout_seed(seed, group_id, 0),
    )
    ledger.dispatch(
        STAGE,
        ticket.purpose,
        group_id,
        instance.task,
        msgspec.to_builtins(instance),
        [ticket.session_id],
    )
    return (await runner.run(ticket)).reward
