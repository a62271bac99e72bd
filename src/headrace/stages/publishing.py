"""How an RL stage's weights become a version: on the disk, in the ledger, in the engines, in order.

Engines get only what a crash cannot lose: the checkpoint is whole and the ledger names it before
they switch. A trainer that generation does not wait for goes on as soon as its weights are copied;
everything else happens beside its next update.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from headrace.cluster.types import Requests, WorkerFailure
from headrace.engine.config import UpdatePolicy
from headrace.engine.types import PolicyEngine
from headrace.errors import UserError
from headrace.model.shared_folder import own_folder
from headrace.recipe import AgenticRlStage
from headrace.stages.context import (
    SAVE_TIMEOUT_S,
    StageContext,
    save_weights,
    take_version,
    upcoming_version,
)
from headrace.stages.trainers import TrainerGroup
from headrace.training.rl import Progress

_KEPT_VERSIONS = 2


class Transport:
    """Brings the trainer's weights to the engine.

    Args:
        context: of the stage.
        engine: whose weights to change.
        worker: the trainer.
        folder: of versions in shared memory; None reads checkpoints from disk.
        policy: what becomes of running requests.
    """

    def __init__(
        self,
        context: StageContext,
        engine: PolicyEngine,
        worker: Requests,
        folder: Path | None,
        policy: UpdatePolicy = "continue",
    ) -> None:
        self._context = context
        self._engine = engine
        self._worker = worker
        self._folder = folder
        self._policy: UpdatePolicy = policy

    async def share(self, version: int) -> str | None:
        """Put the trainer's present weights where the engine can read them; None: on the disk."""
        if self._folder is None:
            return None
        payload = {
            "folder": str(self._folder),
            "version": version,
            "dtype": self._context.recipe.engine.dtype,
        }
        try:
            return await self._worker.request("publish", payload, timeout_s=SAVE_TIMEOUT_S)
        except WorkerFailure as refusal:
            self._go_through_the_disk(refusal)
            return None

    async def update_engine(self, shared: str | None, checkpoint: Path, version: int) -> None:
        """Switch the engine to `version`, which `shared` and `checkpoint` hold."""
        if shared is not None:
            try:
                await self._engine.load_weights(
                    shared, version, self._policy, checkpoint=str(checkpoint)
                )
                return
            except UserError as refusal:
                # What the engine refused it has not taken, and the checkpoint is there.
                self._go_through_the_disk(refusal)
        await self._engine.load_weights(str(checkpoint), version, self._policy)

    def _go_through_the_disk(self, refusal: Exception) -> None:
        self._folder = None
        self._context.message(f"weights go through the disk from here on: {refusal}")


@contextlib.asynccontextmanager
async def open_transport(
    context: StageContext,
    engine: PolicyEngine,
    worker: Requests,
    policy: UpdatePolicy = "continue",
) -> AsyncIterator[Transport]:
    """A transport for the stage, as the recipe says; nothing of it stays in shared memory."""
    if context.recipe.engine.weight_transport == "disk":
        yield Transport(context, engine, worker, None, policy)
        return
    # The same name after a crash, so that what was left behind is found.
    run = hashlib.blake2b(os.fsencode(context.run_dir.resolve()), digest_size=8).hexdigest()
    with own_folder(run) as folder:
        yield Transport(context, engine, worker, folder, policy)


class Source(Protocol):
    """What a publication has to do with whoever generates."""

    async def settle(self) -> None:
        """Wait until new weights may come."""
        ...

    def published(self, version: int) -> None:
        """The engines have them."""
        ...


class Publisher:
    """Publishes versions, one at a time.

    Args:
        context, stage: what for.
        worker: the trainer.
        transport: to the engines.
        source: told of new weights.
        tokenizer: directory whose tokenizer files go along.
        recorded: called with (step, version, checkpoint) in the transaction that records them.
        pinned: checkpoints that are still needed.
    """

    def __init__(
        self,
        context: StageContext,
        stage: AgenticRlStage,
        *,
        worker: TrainerGroup,
        transport: Transport,
        source: Source,
        tokenizer: Path,
        recorded: Callable[[int, int, Path], None],
        pinned: Callable[[], set[Path]],
    ) -> None:
        self._context = context
        self._stage = stage
        self._worker = worker
        self._transport = transport
        self._source = source
        self._tokenizer = tokenizer
        self._recorded = recorded
        self._pinned = pinned
        self._running: asyncio.Task[float] | None = None

    async def publish(self, progress: Progress) -> float:
        """Make the trainer's weights the next version; sets `progress.version` when they are.

        In mode "async" this returns when the trainer may change its weights; the rest goes on,
        and the next publication waits for it. What fails there is raised then, or by `finish`.

        Returns:
            Seconds that this waited for rollouts to end.
        """
        await self.finish()
        stage, step = self._stage, progress.step
        version = upcoming_version(self._context.ledger)
        path = self._context.run_dir / "weights" / f"{stage.name}-v{version:06d}"
        # The trainer answers in order and need not wait here between the two.
        copied = asyncio.gather(
            save_weights(
                self._worker,
                path,
                tokenizer=self._tokenizer,
                optimizer=True,
                reset_optimizer=stage.reset_optimizer,
                beside=True,
                version=version,
            ),
            self._transport.share(version),
        )
        # Asked before the next update can be, or it would be answered after that one.
        written = asyncio.create_task(
            self._worker.request("written", timeout_s=SAVE_TIMEOUT_S), name=f"{path.name} written"
        )
        try:
            _, shared = await copied
        except BaseException:
            written.cancel()
            await asyncio.gather(written, return_exceptions=True)
            raise
        self._running = asyncio.create_task(
            self._complete(progress, step, version, path, shared, written),
            name=f"version {version}",
        )
        if stage.mode == "async":
            return 0.0
        return await self.finish()

    async def finish(self) -> float:
        """Wait for the publication that goes on, if one does; see `publish`."""
        running, self._running = self._running, None
        return 0.0 if running is None else await running

    def check(self) -> None:
        """Raise what the publication that goes on failed with, if it did."""
        if self._running is not None and self._running.done():
            self._running.result()

    async def close(self) -> None:
        """Give up what goes on. The ledger does not know of it, or knows all of it."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _complete(
        self,
        progress: Progress,
        step: int,
        version: int,
        path: Path,
        shared: str | None,
        written: Awaitable[None],
    ) -> float:
        stage, ledger = self._stage.name, self._context.ledger
        await written
        with ledger.transaction():
            take_version(ledger, version)
            ledger.publish(stage, version, step, path)
            ledger.checkpointed(stage, step, path)
            self._recorded(step, version, path)
        settling = time.monotonic()
        await self._source.settle()
        settled = time.monotonic()
        await self._transport.update_engine(shared, path, version)
        progress.version = version
        self._source.published(version)
        await self.prune()
        return settled - settling

    async def prune(self) -> None:
        """Delete published weights that nobody needs any more."""
        pinned = self._pinned()
        folders = sorted((self._context.run_dir / "weights").glob(f"{self._stage.name}-v*"))
        for folder in folders[:-_KEPT_VERSIONS]:
            if folder not in pinned:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
