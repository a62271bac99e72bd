"""The task services of a recipe, wherever they run: in the run's process, in one of their own, or
somewhere else behind HTTP.

Opened and closed together with the sandboxes of this process. It knows nothing of models.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from headrace.cluster.local import LocalCluster
from headrace.errors import UserError
from headrace.recipe import Recipe, TaskTable
from headrace.recipe.tables import SandboxTable
from headrace.sandbox import open_provider
from headrace.sandbox.types import Limits, SandboxProvider
from headrace.tasks.registry import make_task, resolved_options
from headrace.tasks.remote import FixedPlace, Place, ProcessPlace, RemoteSettings, RemoteTasks
from headrace.tasks.remote.client import check_url
from headrace.tasks.types import TaskService


def check_tasks(recipe: Recipe, names: set[str]) -> None:
    """Look for mistakes in the named tasks and in every table of the recipe.

    A service elsewhere is not asked.

    Raises:
        UserError: the first one.
    """
    for name in sorted(names | set(recipe.tasks)):
        table = recipe.tasks.get(name, TaskTable())
        if table.service is None:
            make_task(name, table.options, None, table.implementation)
        else:
            _fixed_place(name, table)


def sandbox_limits(table: SandboxTable) -> Limits:
    """What a recipe's table allows a sandbox."""
    return Limits(
        wall_s=table.wall_s,
        cpu_s=table.wall_s,
        processes=table.processes,
        memory_mb=table.memory_mb,
        output_bytes=table.output_bytes,
        disk_mb=table.disk_mb,
    )


@contextlib.asynccontextmanager
async def open_tasks(
    recipe: Recipe,
    names: set[str],
    *,
    no_isolation: bool,
    log_dir: Path | None = None,
    report: Callable[[str], None] | None = None,
) -> AsyncIterator[tuple[SandboxProvider | None, dict[str, TaskService]]]:
    """Sandboxes and the named task services; no sandboxes where no service runs in this process.

    Args:
        log_dir: takes the output of services in processes of their own.
        report: told in words when a service is lost and when it is back.

    Raises:
        UserError: unknown task or option, no isolation on this machine, or a service that cannot
            be used.
    """
    check_tasks(recipe, names)  # mistakes before anything starts
    box = recipe.sandbox
    kind = "none" if no_isolation and box.kind in ("auto", "none") else box.kind
    limits = sandbox_limits(box)
    measured = recipe.evaluation.task_names if recipe.evaluation is not None else ()
    async with contextlib.AsyncExitStack() as stack:
        provider: SandboxProvider | None = None
        cluster: LocalCluster | None = None
        services: dict[str, TaskService] = {}
        for name in sorted(names):
            table = recipe.tasks.get(name, TaskTable())
            place: Place
            if table.service is not None:
                place = _fixed_place(name, table)
            elif table.where == "process":
                if cluster is None:
                    cluster = LocalCluster()
                    stack.push_async_callback(cluster.close)
                place = ProcessPlace(
                    name,
                    {
                        "name": name,
                        "options": table.options,
                        "implementation": table.implementation,
                        "sandbox": {"kind": kind, "limits": msgspec.to_builtins(limits)},
                    },
                    cluster=cluster,
                    log_path=None if log_dir is None else str(log_dir / f"task-{name}.log"),
                    start_s=table.start_s,
                )
            else:
                if provider is None:
                    provider = open_provider(kind, limits)
                    stack.push_async_callback(provider.close)
                services[name] = make_task(name, table.options, provider, table.implementation)
                close = getattr(services[name], "close", None)
                if close is not None:
                    stack.push_async_callback(close)
                continue
            remote = await RemoteTasks.open(
                name,
                place,
                _settings(table),
                options=table.options
                if table.implementation is not None
                else resolved_options(name, table.options),
                evaluation=recipe.evaluation.instances
                if recipe.evaluation is not None and name in measured
                else 0,
                **({} if report is None else {"report": report}),
            )
            stack.push_async_callback(remote.close)
            services[name] = remote
        yield provider, services


def _fixed_place(name: str, table: TaskTable) -> FixedPlace:
    assert table.service is not None, "the caller looked"
    url = check_url(table.service, f"tasks.{name}.service")
    token = None
    if table.token_env is not None:
        token = os.environ.get(table.token_env)
        if not token:
            raise UserError(
                f"tasks.{name}.token_env: the environment variable {table.token_env} is not set"
            )
        if not token.isascii() or not token.isprintable() or " " in token:
            raise UserError(
                f"tasks.{name}.token_env: {table.token_env} holds characters that no token may have"
            )
    return FixedPlace(url, token)


def _settings(table: TaskTable) -> RemoteSettings:
    return RemoteSettings(rollouts=table.rollouts, answer_s=table.answer_s, poll_s=table.poll_s)
