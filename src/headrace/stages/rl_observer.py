"""What an RL stage logs after each update: rates, windows of the source, utilisation.

It turns counters into metrics of one stretch of time; what they are for is not known here.
"""

import time
from collections.abc import Awaitable, Mapping
from typing import Any

from headrace.engine.types import PolicyEngine
from headrace.recipe import AgenticRlStage
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.window import Hold, Window
from headrace.stages.context import StageContext
from headrace.stages.task_metrics import task_metrics
from headrace.stages.tripping import StageTripwires
from headrace.tasks.types import TaskService
from headrace.training import rl


class RlObserver:
    """Turns the loop's updates into metrics: rates, windows and utilisation."""

    def __init__(
        self,
        context: StageContext,
        stage: AgenticRlStage,
        *,
        source: RolloutSource,
        engine: PolicyEngine,
        progress: rl.Progress,
        wires: StageTripwires,
    ) -> None:
        self.context = context
        self.stage = stage
        self.source = source
        self.system_engine = engine
        self.progress = progress
        self.wires = wires
        self.last = time.monotonic()
        self.engine: dict[str, float] = {}
        self.trainer_busy = 0.0

    def report(self, update: rl.Update) -> Awaitable[None]:
        """Log one update: counts what is known now; what engines say of it is awaited."""
        now = time.monotonic()
        seconds = max(now - self.last, 1e-6)
        self.last = now
        self.context.ledger.put_state(seconds_key(self.stage.name), self.progress.elapsed_s)
        self.context.progress(rl.done_fraction(self.stage, self.progress))
        metrics = self._measured(update, self.source.take_window(), seconds)
        return self._log(update.step, metrics, seconds)

    async def _log(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        engine = await self.system_engine.stats()
        if self.engine:
            sampled = engine["tokens_sampled"] - self.engine["tokens_sampled"]
            busy = engine["busy_s"] - self.engine["busy_s"]
            engines = max(1, engine.get("serving", 1))
            metrics["engine_busy"] = min(1.0, busy / seconds / engines)
            metrics["gen_tokens_per_s"] = sampled / seconds
        self.engine = engine
        self.context.log(self.stage.name, step, metrics | _replica_metrics(engine))

    def _measured(self, update: rl.Update, window: Window, seconds: float) -> dict[str, float]:
        trained = dict(update.metrics)
        busy = trained.pop("busy_s")
        # A trainer that took the place of one that died counts from zero.
        trained_s = busy - self.trainer_busy if busy >= self.trainer_busy else busy
        self.trainer_busy = busy
        metrics = {
            **trained,
            "version": float(update.version),
            "trained_trajectories": float(update.trajectories),
            "wait_s": update.wait_s,
            "publish_s": update.publish_s,
            **_held_metrics(window),
            "held_slots": window.held_slot_s / seconds,
            "step_s": seconds,
            "train_tokens_per_s": update.metrics["trained_tokens"] / seconds,
            "trainer_busy": min(1.0, trained_s / seconds),
            "queue_groups": float(self.source.ready_groups),
            "rollouts_in_flight": float(self.source.in_flight),
            "dropped_stale": float(window.dropped_stale),
            "dropped_no_signal": float(window.dropped_no_signal),
            "env_failed": float(window.env_failed),
            "retried": float(window.retried),
            **{f"failed.{reason}": float(n) for reason, n in window.failures.items()},
            "rollouts_per_s": window.finished / seconds,
        }
        metrics |= self.wires.measures()
        metrics |= task_metrics(self.source.sharing, window, seconds)
        metrics |= _failure_metrics(self.source, window, self.context.tasks)
        if window.scored:
            metrics["reward_mean"] = window.reward_sum / window.scored
            metrics["success_rate"] = metrics["reward_mean"]
        if window.finished:
            metrics["turns_mean"] = window.turns / window.finished
        return metrics


def seconds_key(stage: str) -> str:
    """Name under which the ledger keeps a stage's seconds of work."""
    return f"seconds:{stage}"


def _held_metrics(window: Window) -> dict[str, float]:
    """Seconds for which no rollout was begun although there were cores, memory and instances.

    Full concurrency is what a stage asks for, so it is not part of the sum.
    """
    held = {f"held.{reason}_s": window.held.get(reason, 0.0) for reason in Hold}
    full = window.held.get(Hold.CONCURRENCY, 0.0)
    return {"held_s": sum(window.held.values()) - full, **held}


def _failure_metrics(
    source: RolloutSource, window: Window, tasks: Mapping[str, TaskService]
) -> dict[str, float]:
    """How the environment of each task fails; nothing where none has."""
    found = {}
    for name in source.sharing.mix.ratios:
        pauses, failed = source.pauses.pauses(name), window.of(name).env_failed
        losses = getattr(tasks[name], "losses", 0)
        misreports = getattr(tasks[name], "misreports", 0)
        if pauses or failed or losses or misreports:
            place = f"task.{name}"
            found[f"{place}.paused"] = float(name in source.pauses.paused)
            found[f"{place}.pauses"] = float(pauses)
            found[f"{place}.service_losses"] = float(losses)
            found[f"{place}.service_misreports"] = float(misreports)
    return found


def _replica_metrics(stats: dict[str, Any]) -> dict[str, float]:
    """How replicas are, all together and each; nothing of an engine that has none."""
    replicas = stats.get("replicas")
    if replicas is None:
        return {}
    found = {
        "replicas_serving": float(stats["serving"]),
        "replica_restarts": float(sum(replica["restarts"] for replica in replicas)),
        "replica_imbalance": float(stats["imbalance"]),
    }
    for replica in replicas:
        place = f"replica.{replica['name']}"
        found[f"{place}.serving"] = float(replica["state"] == "serving")
        for name in ("version", "sessions", "requests", "restarts"):
            found[f"{place}.{name}"] = float(replica[name])
    return found
