"""How an RL stage hands weights over: through shared memory, and through the disk if that fails."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster.types import WorkerDied, WorkerFailure
from headrace.errors import UserError
from headrace.model import shared_folder
from headrace.stages.agentic_rl import _open_transport


class Trainer:
    """Publishes by making a directory."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.published: list[dict[str, Any]] = []

    async def request(self, method: str, payload: Any, *, timeout_s: float) -> str:
        assert method == "publish"
        self.published.append(payload)
        if self.failure is not None:
            raise self.failure
        path = Path(payload["folder"]) / f"v{payload['version']}.weights"
        path.mkdir(parents=True)
        return str(path)


class Engine:
    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.refused = refused
        self.loaded: list[tuple[str, int, str | None]] = []

    async def load_weights(self, path: str, version: int, *, checkpoint: str | None = None) -> None:
        if version in self.refused and path.endswith(".weights"):
            raise UserError("does not match its checksum")
        self.loaded.append((path, version, checkpoint))


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_folder, "_SHARED_MEMORY", folder)
    return folder


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def context_of(run_dir: Path, told: list[str], way: str = "shared") -> Any:
    table = SimpleNamespace(weight_transport=way, dtype="bfloat16")
    recipe = SimpleNamespace(engine=table)
    return SimpleNamespace(run_dir=run_dir, message=told.append, recipe=recipe)


async def updates(
    tmp_path: Path, engine: Engine, trainer: Trainer, way: str = "shared"
) -> list[str]:
    """Three updates of which the second does not wait for the engine; returns what people were
    told."""
    told: list[str] = []
    stand_ins: Any = (engine, trainer)
    async with _open_transport(context_of(tmp_path / "run", told, way), *stand_ins) as transport:
        for version in (1, 2, 3):
            await transport.update_engine(Path(f"disk{version}"), version, beside=version == 2)
    return told


class SlowEngine(Engine):
    """Loads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.begun: asyncio.Queue[int] = asyncio.Queue()

    async def load_weights(self, path: str, version: int, *, checkpoint: str | None = None) -> None:
        self.begun.put_nowait(version)
        await self.go_on.wait()
        if version == 2:
            raise UserError("no such weights")
        await super().load_weights(path, version, checkpoint=checkpoint)


async def test_the_trainer_goes_on_while_the_engine_loads(shm: Path, tmp_path: Path) -> None:
    stand_ins: Any = (engine := SlowEngine(), Trainer())
    async with _open_transport(context_of(tmp_path, [], "disk"), *stand_ins) as transport:
        await transport.update_engine(Path("disk1"), 1, beside=True)
        assert engine.loaded == []
        # The next version waits for this one: versions never overtake each other.
        second = asyncio.create_task(transport.update_engine(Path("disk2"), 2, beside=True))
        assert await engine.begun.get() == 1
        await asyncio.sleep(0)
        assert engine.begun.empty()
        assert not second.done()
        engine.go_on.set()
        await second
        assert engine.loaded == [("disk1", 1, None)]
        with pytest.raises(UserError, match="no such weights"):
            await transport.settled()
        # What nobody waits for ends with the stage.
        engine.go_on.clear()
        await transport.update_engine(Path("disk3"), 3, beside=True)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("load")] == []


async def test_weights_go_through_shared_memory_and_none_stay(shm: Path, tmp_path: Path) -> None:
    engine, trainer = Engine(), Trainer()
    assert await updates(tmp_path, engine, trainer) == []
    folder = Path(trainer.published[0]["folder"])
    assert folder.parent == shm
    assert left_in(shm) == []
    assert [p["dtype"] for p in trainer.published] == ["bfloat16"] * 3
    assert engine.loaded == [(str(folder / f"v{v}.weights"), v, f"disk{v}") for v in (1, 2, 3)]
    # A killed run leaves its folder; the next start of the same run removes it.
    (folder / "v9.weights").mkdir(parents=True)
    await updates(tmp_path, engine, again := Trainer())
    assert again.published[0]["folder"] == str(folder)
    assert left_in(shm) == []


@pytest.mark.parametrize("failure", ["trainer", "engine"])
async def test_what_fails_goes_through_the_disk_from_then_on(
    shm: Path, tmp_path: Path, failure: str
) -> None:
    engine, trainer = Engine(), Trainer()
    if failure == "trainer":
        trainer.failure = WorkerFailure("user_error", "No space left")
    else:
        engine.refused = (1,)
    told = await updates(tmp_path, engine, trainer)
    assert len(told) == 1
    assert "No space left" in told[0] or "checksum" in told[0]
    assert engine.loaded == [(f"disk{v}", v, None) for v in (1, 2, 3)]
    assert len(trainer.published) == 1
    assert left_in(shm) == []


async def test_disk_is_asked_for_and_a_dead_trainer_is_told(shm: Path, tmp_path: Path) -> None:
    engine, trainer = Engine(), Trainer()
    assert await updates(tmp_path, engine, trainer, "disk") == []
    assert engine.loaded == [(f"disk{v}", v, None) for v in (1, 2, 3)]
    assert trainer.published == []
    with pytest.raises(WorkerDied):
        await updates(tmp_path, engine, Trainer(WorkerDied("rl")))
    assert left_in(shm) == []
