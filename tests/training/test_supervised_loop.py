"""The loop of supervised stages: budgets, phases, and resuming as if nothing had happened."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.training.supervised import Budget, Phase, Position, train


class Interrupted(Exception):
    """Stands in for a crash."""


class RecordingTrainer:
    """Remembers what it was asked; `disk` outlives it like files would."""

    def __init__(self, disk: dict[str, Any], fail_at: int | None = None) -> None:
        self.disk = disk
        self.fail_at = fail_at
        self.steps: list[tuple[int, float]] = []
        self.phase = -1

    async def request(
        self, method: str, payload: dict[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> Any:
        payload = payload or {}
        if method == "progress":
            return self.disk.get("position")
        if method == "phase":
            self.phase = payload["number"]
        if method == "restore":
            self.steps = list(self.disk["steps"])
        if method == "checkpoint":
            self.disk.update(position=payload["position"], steps=list(self.steps))
        if method == "supervised":
            for rate in payload["learning_rates"]:
                if self.fail_at is not None and len(self.steps) >= self.fail_at:
                    raise Interrupted
                self.steps.append((self.phase, rate))
            return {"loss": 0.0}
        return None


def run(budget: Budget, ends: list[float], every: int, trainer: RecordingTrainer) -> Position:
    async def report(position: Position, done: float, metrics: dict[str, float]) -> None:
        assert 0 <= done <= 1

    phases = [Phase(end, {"number": i}) for i, end in enumerate(ends)]
    return asyncio.run(
        train(
            budget,
            worker=trainer,
            phases=phases,
            checkpoint="x",
            checkpoint_every=every,
            keep=1,
            report=report,
        )
    )


@given(
    steps=st.integers(1, 40),
    every=st.integers(1, 12),
    fail_at=st.integers(0, 39),
    ends=st.sampled_from([[1.0], [0.5, 1.0], [0.3, 0.35, 1.0]]),
)
def test_an_interrupted_stage_ends_as_an_uninterrupted_one(steps, every, fail_at, ends):
    budget = Budget(steps, None, 1e-3, 5, 0.1)
    whole = RecordingTrainer({})
    run(budget, ends, every, whole)
    disk: dict[str, Any] = {}
    first = RecordingTrainer(disk, fail_at)
    if fail_at < steps:
        with pytest.raises(Interrupted):
            run(budget, ends, every, first)
    second = RecordingTrainer(disk)
    run(budget, ends, every, second)
    assert second.steps == whole.steps
    assert len(whole.steps) == steps


def test_every_step_belongs_to_the_phase_its_number_says():
    trainer = RecordingTrainer({})
    run(Budget(10, None, 1.0, 0, 1.0), [0.25, 1.0], 100, trainer)
    assert [phase for phase, _ in trainer.steps] == [0] * 3 + [1] * 7


def test_rates_rise_and_fall():
    budget = Budget(10, None, 1.0, 1, 0.5)
    assert budget.rate(0, 0.0) == 0.5
    assert budget.rate(1, 0.0) == pytest.approx(0.95)
    assert budget.rate(9, 0.0) == pytest.approx(0.55)
    assert budget.done(10, 0.0) == 1.0


def test_seconds_end_a_stage_too():
    budget = Budget(1000, 10.0, 1.0, 0, 0.0)
    assert budget.done(1, 5.0) == 0.5
    assert budget.done(600, 5.0) == 0.6
