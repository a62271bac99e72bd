"""Processes that share the runs of a benchmark, and end with it however it ends."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from headrace.cluster.worker import die_with_parent


def worker_pool(
    processes: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> ProcessPoolExecutor:
    """As `ProcessPoolExecutor` over spawned processes. Make it in the main thread: workers end with
    the thread that started them."""
    return ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(initializer, initargs),
    )


def _start(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    die_with_parent()
    if initializer is not None:
        initializer(*initargs)
