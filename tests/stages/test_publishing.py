"""What a publication does in which order, and what of it a trainer waits for."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster.types import WorkerFailure
from headrace.recipe import AgenticRlStage
from headrace.rollout.record.ledger import Ledger
from headrace.stages.publishing import Publisher, Transport
from headrace.training.rl import Progress

TIMEOUT = 10.0


class Rig:
    """Trainer, engine and source in one, that note what is asked of them in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.events: list[str] = []
        self.written = asyncio.Event()
        self.settled = asyncio.Event()
        self.settling = asyncio.Event()
        self.failure: Exception | None = None

    async def request(self, method: str, payload: Any = None, *, timeout_s: float = 60.0) -> Any:
        self.asked.append(method)
        if method == "written":
            await self.written.wait()
            if self.failure is not None:
                raise self.failure
        if method == "save":
            assert payload["beside"]
            (Path(payload["path"])).mkdir(parents=True)  # noqa: ASYNC240
        self.events.append(method)
        return "/shared" if method == "publish" else None

    async def load_weights(self, path: str, version: int, policy: str, **_: Any) -> None:
        self.events.append(f"{policy} {version} from {path}")

    async def settle(self) -> None:
        self.settling.set()
        await self.settled.wait()
        self.events.append("settled")

    def published(self, version: int) -> None:
        self.events.append(f"published {version}")


def new_publisher(ledger: Ledger, folder: Path, rig: Any, **stage: Any) -> Publisher:
    table = SimpleNamespace(dtype="float32")
    context: Any = SimpleNamespace(
        ledger=ledger, run_dir=folder, recipe=SimpleNamespace(engine=table), message=print
    )
    parsed = AgenticRlStage.model_validate(
        {"kind": "agentic_rl", "name": "rl", "updates": 9, **stage}
    )
    return Publisher(
        context,
        parsed,
        worker=rig,
        transport=Transport(context, rig, rig, Path("/shm"), "requeue"),
        source=rig,
        tokenizer=folder,
        recorded=lambda step, version, path: rig.events.append(f"recorded {step} as {version}"),
        pinned=lambda: {folder / "weights" / "rl-v000001"},
    )


async def test_async_waits_for_the_copy_alone_and_engines_get_what_is_durable(tmp_path):
    rig, progress = Rig(), Progress(step=3)
    with Ledger.create(tmp_path) as ledger:
        publisher = new_publisher(ledger, tmp_path, rig)
        assert await asyncio.wait_for(publisher.publish(progress), TIMEOUT) == 0.0
        assert rig.events == ["save", "publish"]
        progress.step = 4  # the next update, while the checkpoint is written
        second = asyncio.create_task(publisher.publish(progress))
        await asyncio.sleep(0)
        assert not second.done(), "publications never overlap"
        assert ledger.publications("rl") == []
        rig.written.set()
        rig.settled.set()
        await asyncio.wait_for(second, TIMEOUT)
        await publisher.finish()
        assert rig.events[2:7] == [
            "written", "recorded 3 as 1", "settled", "requeue 1 from /shared", "published 1",
        ]  # fmt: skip
        assert [(p.step, p.version) for p in ledger.publications("rl")] == [(3, 1), (4, 2)]
        assert progress.version == 2


async def test_what_is_written_is_not_asked_for_behind_the_next_update(tmp_path):
    """A trainer answers in order: the engines would get the weights an update later."""
    rig = Rig()
    rig.written.set()
    rig.settled.set()
    with Ledger.create(tmp_path) as ledger:
        publisher = new_publisher(ledger, tmp_path, rig)
        await publisher.publish(Progress(step=1))
        await rig.request("rl")
        assert rig.asked == ["save", "publish", "written", "rl"]
        await publisher.finish()


async def test_a_copy_that_fails_leaves_nothing_behind(tmp_path):
    rig = Rig()
    (tmp_path / "weights" / "rl-v000001").mkdir(parents=True)  # the rig's trainer minds
    with Ledger.create(tmp_path) as ledger:
        publisher = new_publisher(ledger, tmp_path, rig)
        with pytest.raises(FileExistsError):
            await publisher.publish(Progress(step=1))
        await publisher.finish()
        assert ledger.publications("rl") == []
        assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_modes_in_step_wait_for_all_of_it_and_count_the_wait_for_rollouts(tmp_path):
    rig, progress = Rig(), Progress(step=1)
    rig.written.set()
    with Ledger.create(tmp_path) as ledger:
        publisher = new_publisher(ledger, tmp_path, rig, mode="one_step_off")
        running = asyncio.create_task(publisher.publish(progress))
        await asyncio.wait_for(rig.settling.wait(), TIMEOUT)
        assert rig.events[-1] == "recorded 1 as 1"
        assert not running.done()
        assert progress.version == 0
        rig.settled.set()
        assert await asyncio.wait_for(running, TIMEOUT) > 0.0
        assert progress.version == 1


async def test_a_publication_that_fails_is_in_no_record_and_is_told(tmp_path):
    rig = Rig()
    rig.failure = WorkerFailure("user_error", "disk full")
    rig.written.set()
    with Ledger.create(tmp_path) as ledger:
        publisher = new_publisher(ledger, tmp_path, rig)
        await publisher.publish(Progress(step=1))
        publisher.check()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(WorkerFailure, match="disk full"):
            publisher.check()
        with pytest.raises(WorkerFailure, match="disk full"):
            await publisher.finish()
        assert ledger.publications("rl") == []
        await publisher.close()


async def test_old_weights_go_unless_somebody_needs_them(tmp_path):
    rig, progress = Rig(), Progress()
    rig.written.set()
    rig.settled.set()
    with Ledger.create(tmp_path) as ledger:
        publisher = new_publisher(ledger, tmp_path, rig, mode="sync")
        for step in range(1, 6):
            progress.step = step
            await publisher.publish(progress)
    left = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert left == ["rl-v000001", "rl-v000004", "rl-v000005"]
