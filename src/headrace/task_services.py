"""The task services of a recipe, wherever they run: in the run's process, in one of their own, or
somewhere else behind HTTP.

Opened and closed together with the sandboxes of this process. It knows nothing of models.
"""

import contextlib
import json
import logging
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from headrace.cluster.local import LocalCluster
from headrace.errors import UserError
from headrace.http.server import is_loopback
from headrace.recipe import Recipe, TaskTable
from headrace.recipe.tables import SandboxTable
from headrace.sandbox import open_provider
from headrace.sandbox.types import Limits, SandboxProvider
from headrace.tasks.registry import make_task, resolved_options, task_names
from headrace.tasks.remote import (
    FixedPlace,
    Place,
    PoolSettings,
    ProcessPlace,
    Register,
    RemoteSettings,
    RemoteTasks,
    ServicePool,
)
from headrace.tasks.remote.client import check_url
from headrace.tasks.types import TaskService

logger = logging.getLogger(__name__)


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
        elif table.registers:
            _token(name, table)
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
    report: Callable[[str], None] = logger.warning,
) -> AsyncIterator[tuple[SandboxProvider | None, dict[str, TaskService]]]:
    """Sandboxes and the named task services; no sandboxes where no service runs in this process.

    Args:
        log_dir: takes the output of services in processes of their own, and what those that
            register said of themselves.
        report: told in words when a service is waited for, lost, and back.

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
        pools = await _open_pools(stack, recipe, names, log_dir=log_dir, report=report)
        for name in sorted(names):
            table = recipe.tasks.get(name, TaskTable())
            place: Place | ServicePool
            if name in pools:
                place = pools[name]
                if name != min(pools) and not place.there:
                    # Those before it have had their say since, and a view shows few messages.
                    report(f"still {place.waiting}")
            elif table.service is not None:
                place = _fixed_place(name, table)
                _mind_the_way_back(recipe, name, place.name, report)
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
                options=_named_options(name, table),
                evaluation=recipe.evaluation.instances
                if recipe.evaluation is not None and name in measured
                else 0,
                report=report,
            )
            stack.push_async_callback(remote.close)
            services[name] = remote
        yield provider, services


async def _open_pools(
    stack: contextlib.AsyncExitStack,
    recipe: Recipe,
    names: Iterable[str],
    *,
    log_dir: Path | None,
    report: Callable[[str], None],
) -> dict[str, ServicePool]:
    """For every task that registers those who will serve it, and the port at which they do; says
    what is waited for. Closed with `stack`."""
    tables = {n: recipe.tasks[n] for n in sorted(names) if n in recipe.tasks}
    tables = {name: table for name, table in tables.items() if table.registers}
    if not tables:
        return {}
    gateway = recipe.gateway
    register = await Register.start(
        host=gateway.host, port=gateway.register_port, address=gateway.address, report=report
    )
    stack.push_async_callback(register.stop)
    pools: dict[str, ServicePool] = {}
    for name, table in tables.items():
        target = name if name in task_names() else "package.module:Class"
        named = _named_options(name, table)
        command = " ".join(
            [
                *("headrace tasks serve", target),
                *(f"--set {shlex.quote(f'{k}={json.dumps(v)}')}" for k, v in named.items()),
                *("--token-env", str(table.token_env), "--register", register.url),
            ]
        )
        pools[name] = ServicePool(
            name,
            _token(name, table),
            _settings(table),
            PoolSettings(
                wait_s=table.register_s,
                run=recipe.name,
                remedy=f"start it with: {command}",
                limit_name=f"tasks.{name}.register_s",
            ),
            options=named,
            report=report,
            record=_recorder(log_dir, name),
        )
        stack.push_async_callback(pools[name].close)
        register.expect(pools[name])
        report(pools[name].waiting)
    return pools


def _recorder(log_dir: Path | None, name: str) -> Callable[[Mapping[str, Any]], None]:
    """Keeps what registered, so that what a run trained on can be read afterwards."""
    if log_dir is None:
        return lambda said: None
    path = log_dir / f"task-{name}.jsonl"

    def record(said: Mapping[str, Any]) -> None:
        line = json.dumps({"at": time.time(), **said}) + "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(line)

    return record


def _named_options(name: str, table: TaskTable) -> dict[str, Any]:
    """The options of a recipe that a service elsewhere has to be served with."""
    if table.implementation is not None:
        return table.options
    return resolved_options(name, table.options)


def _fixed_place(name: str, table: TaskTable) -> FixedPlace:
    assert table.service is not None, "the caller looked"
    url = check_url(table.service, f"tasks.{name}.service")
    return FixedPlace(url, None if table.token_env is None else _token(name, table))


def _mind_the_way_back(recipe: Recipe, name: str, url: str, report: Callable[[str], None]) -> None:
    """Say so where a service on another machine is to call a gateway on loopback."""
    host = recipe.gateway.host
    if is_loopback(host) and not is_loopback(httpx.URL(url).host):
        report(
            f"task {name} is served at {url}, but gateway.host {host} is reached from this machine "
            'only: unless there is a tunnel, set gateway.host = "0.0.0.0"'
        )


def _token(name: str, table: TaskTable) -> str:
    """The token that a table names.

    Raises:
        UserError: there is none, or one that cannot be sent.
    """
    token = os.environ.get(table.token_env or "")
    if not token:
        raise UserError(
            f"tasks.{name}.token_env: the environment variable {table.token_env} is not set"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"tasks.{name}.token_env: {table.token_env} holds characters that no token may have"
        )
    return token


def _settings(table: TaskTable) -> RemoteSettings:
    return RemoteSettings(rollouts=table.rollouts, answer_s=table.answer_s, poll_s=table.poll_s)
