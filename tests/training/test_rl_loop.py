"""The RL loop against a scripted source and trainer: budgets, stops, what a publication costs."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.recipe import AgenticRlStage
from headrace.rollout.types import Segment
from headrace.training import rl

TOKENS = 3
"""Trained tokens of each batch: one trajectory, counted twice, which makes no difference."""


class Source:
    replaying = False

    def __init__(self, batches: int = 1000) -> None:
        self.left = batches
        self.versions: list[int] = []

    async def cut(self, version: int, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        if self.left == 0:
            return None
        self.left -= 1
        self.versions.append(version)
        mask = (False, True, True, True)
        segment = Segment("s", (1, 2, 3, 4), mask, (0.0, -1.0, -1.0, -1.0), (-1, 0, 0, 0))
        member = SimpleNamespace(
            group_id="g", task="toy", segments=(segment,), advantage=1.0, multiplicity=2
        )
        return SimpleNamespace(index=len(self.versions) - 1, members=(member,))


class Trainer:
    async def request(self, method: str, payload: Any = None, *, timeout_s: float = 60.0) -> Any:
        assert method == "rl"
        return {"trained_tokens": 0.0}


async def run(
    budget: dict[str, Any],
    stop: Any = lambda: None,
    batches: int = 1000,
    check: Any = lambda step: None,
    reports: list[rl.Update] | None = None,
    **where: Any,
) -> tuple[rl.Progress, list[rl.Update], Source]:
    stage = AgenticRlStage.model_validate({"kind": "agentic_rl", "name": "rl", **budget})
    source, reports = Source(batches), [] if reports is None else reports

    async def publish(progress: rl.Progress) -> float:
        progress.version += 1
        return 0.25

    async def report(update: rl.Update) -> None:
        reports.append(update)

    progress = await rl.train(
        stage,
        source=source,
        trainer=Trainer(),
        publish=publish,
        committed=lambda index, step: None,
        report=report,
        progress=rl.Progress(**where),
        check=check,
        stop=stop,
    )
    return progress, reports, source


@pytest.mark.parametrize(
    ("budget", "steps", "ended_by"),
    [
        ({"updates": 4}, 4, "updates"),
        ({"updates": 9, "trained_tokens": 4 * TOKENS}, 4, "trained_tokens"),
        ({"updates": 3, "trained_tokens": 4 * TOKENS}, 3, "updates"),
        ({"seconds": 1e-9}, 1, "seconds"),
    ],
)
async def test_the_first_budget_that_is_used_up_ends_the_loop(budget, steps, ended_by):
    progress, reports, _ = await run(budget)
    assert (progress.step, progress.ended_by) == (steps, ended_by)
    assert progress.trained_tokens == steps * TOKENS
    assert len(reports) == steps


async def test_budgets_go_on_where_an_earlier_process_was():
    progress, _, source = await run(
        {"updates": 9, "trained_tokens": 30}, step=5, trained_tokens=24, version=7
    )
    assert (progress.step, progress.ended_by) == (7, "trained_tokens")
    assert source.versions == [7, 8]
    done = rl.Progress(step=3, trained_tokens=27, elapsed_s=1.0)
    stage = AgenticRlStage(kind="agentic_rl", name="rl", updates=9, trained_tokens=30, seconds=4)
    assert rl.done_fraction(stage, done) == 0.9
    assert rl.used_up(stage, done) is None


async def test_somebody_else_can_say_stop():
    words = iter([None, None, "patience"])
    progress, _, _ = await run({"updates": 9}, stop=lambda: next(words))
    assert (progress.step, progress.ended_by) == (2, "patience")


async def test_a_source_that_runs_dry_ends_a_stage_with_seconds_and_fails_others():
    progress, _, _ = await run({"seconds": 3600.0, "updates": 9}, batches=2)
    assert (progress.step, progress.ended_by) == (2, "seconds")
    with pytest.raises(TimeoutError, match="no batch"):
        await run({"updates": 9}, batches=2)


async def test_waiting_for_rollouts_in_a_publication_counts_as_waiting():
    _, (first, second), _ = await run({"updates": 2, "publish_every": 2})
    assert first.wait_s < 0.25 <= second.wait_s
    assert second.publish_s < 0.0 < second.wait_s  # the scripted wait took no time
    assert second.tokens == TOKENS


async def test_a_report_is_awaited_beside_the_next_update():
    """A slow engine's statistics keep nobody waiting; none is lost, and what fails is raised."""
    asked, said = asyncio.Event(), []

    class Waits(Trainer):
        async def request(
            self, method: str, payload: Any = None, *, timeout_s: float = 60.0
        ) -> Any:
            if said:
                asked.set()  # the second update runs while the first one's report waits for this
            return await super().request(method, payload, timeout_s=timeout_s)

    def report(update: rl.Update) -> Any:
        said.append(f"begun {update.step}")

        async def go_on() -> None:
            await asyncio.wait_for(asked.wait(), 30.0)
            said.append(f"done {update.step}")
            if update.step == 3:
                raise OSError("disk full")

        return go_on()

    async def publish(progress: rl.Progress) -> float:
        return 0.0

    stage = AgenticRlStage.model_validate({"kind": "agentic_rl", "name": "rl", "updates": 3})
    checked: list[int] = []
    with pytest.raises(OSError, match="disk full"):
        await rl.train(
            stage,
            source=Source(),
            trainer=Waits(),
            publish=publish,
            committed=lambda index, step: None,
            report=report,
            progress=rl.Progress(),
            check=checked.append,
        )
    assert said[:3] == ["begun 1", "begun 2", "done 1"]
    assert sorted(said[3:]) == ["begun 3", "done 2", "done 3"]
    assert checked == [1, 2, 3]


async def test_what_a_check_raises_ends_the_loop_after_the_report():
    class Alarm(Exception):
        pass

    def check(step: int) -> None:
        if step == 2:
            raise Alarm

    reports: list[rl.Update] = []
    with pytest.raises(Alarm):
        await run({"updates": 9}, check=check, reports=reports)
    assert [update.step for update in reports] == [1, 2]
