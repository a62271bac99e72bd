"""Trainer processes: one, or several ranks that a caller talks to as one."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from headrace.cluster.types import Cluster, WorkerHandle, WorkerSpec

_JOIN_TIMEOUT_S = 120.0


class TrainerGroup:
    """Ranks of one trainer. Every request goes to all of them; rank 0 answers."""

    def __init__(self, ranks: Sequence[WorkerHandle]) -> None:
        self._ranks = tuple(ranks)

    async def request(
        self, method: str, payload: dict[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> Any:
        """Ask all ranks and wait for all of them.

        Ranks wait for each other, so the others may never answer once one has failed: its failure
        is raised at once, and the group is of no use any more.

        Raises:
            WorkerDied, WorkerFailure, TimeoutError: of the first rank that failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(rank.request(method, payload, timeout_s=timeout_s))
                    for rank in self._ranks
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return answers[0].result()


@contextlib.asynccontextmanager
async def open_trainer(
    cluster: Cluster,
    name: str,
    cores: tuple[int, ...],
    run_dir: Path,
    *,
    ranks: int = 1,
) -> AsyncIterator[TrainerGroup]:
    """Trainer processes for the duration of the block, with the cores divided among them."""
    handles: list[WorkerHandle] = []
    try:
        for rank in range(ranks):
            own = cores[rank::ranks] or cores[:1]
            suffix = "" if ranks == 1 else f"-rank{rank}"
            handles.append(
                await cluster.start(
                    WorkerSpec(
                        name=name + suffix,
                        target="headrace.training.worker:TrainerWorker",
                        kwargs={"threads": len(own)},
                        cores=own,
                        threads=len(own),
                        log_path=os.fspath(run_dir / "logs" / f"{name}{suffix}.log"),
                    )
                )
            )
        if ranks > 1:
            port = _free_port()
            await asyncio.gather(
                *(
                    handle.request(
                        "join",
                        {"rank": rank, "world": ranks, "address": "127.0.0.1", "port": port},
                        timeout_s=_JOIN_TIMEOUT_S,
                    )
                    for rank, handle in enumerate(handles)
                )
            )
        yield TrainerGroup(handles)
    finally:
        await asyncio.gather(*(handle.stop() for handle in handles))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
