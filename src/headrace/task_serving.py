"""What `headrace tasks serve` does: one task of this machine, behind HTTP, with its sandboxes."""

import asyncio
import contextlib
import os
from typing import Any

import msgspec
from pydantic import ValidationError

from headrace.errors import UserError
from headrace.recipe.loading import apply_override
from headrace.recipe.tables import SandboxTable
from headrace.sandbox import open_provider
from headrace.sandbox.types import Limits, SandboxProvider
from headrace.task_services import sandbox_limits
from headrace.tasks.importing import import_task
from headrace.tasks.registry import create_task
from headrace.tasks.serving import HostLimits
from headrace.tasks.serving.announcing import check_registration
from headrace.tasks.serving.server import check_exposure, serve_until_stopped
from headrace.tasks.types import TaskService


class ServeTaskOptions(msgspec.Struct, frozen=True):
    """How to serve.

    Attributes:
        host: address to bind.
        port: TCP port; 0 picks a free one.
        token_env: variable with the token; None asks for none.
        overrides: "option=value" of the task, or "sandbox.key=value".
        rollouts: most in flight.
        no_isolation: commands may run unprotected.
        register: address at which a run waits for services; None announces nothing.
        url: where that run reaches this one, if not at `host` and `port`.
    """

    host: str = "127.0.0.1"
    port: int = 8700
    token_env: str | None = None
    overrides: tuple[str, ...] = ()
    rollouts: int = 1024
    no_isolation: bool = False
    register: str | None = None
    url: str | None = None


def serve_task(name: str, options: ServeTaskOptions) -> int:
    """Serve until interrupted; returns the exit code.

    Args:
        name: of a task headrace has, or "package.module:Class".
        options: see there.

    Raises:
        UserError: unknown task or option, no token where one is needed, or the port is taken.
    """
    token = None
    if options.token_env is not None:
        token = os.environ.get(options.token_env)
        if not token:
            raise UserError(f"--token-env {options.token_env}: the environment variable is not set")
    check_exposure(options.host, token)
    check_registration(options.register, options.url, token)
    given: dict[str, Any] = {}
    for override in options.overrides:
        apply_override(given, override)
    box = _sandbox(given.pop("sandbox", {}))
    _make(name, given, None)  # mistakes before anything starts
    if box.kind == "none" and not options.no_isolation:
        raise UserError(
            'sandbox.kind "none" lets model-written commands touch this machine; choose "auto", '
            "or confirm with --no-isolation"
        )
    kind = "none" if options.no_isolation and box.kind in ("auto", "none") else box.kind
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(name, given, options, token, kind, sandbox_limits(box)))
    return 0


async def _serve(
    name: str,
    given: dict[str, Any],
    options: ServeTaskOptions,
    token: str | None,
    kind: str,
    limits: Limits,
) -> None:
    provider = open_provider(kind, limits)
    try:
        await serve_until_stopped(
            _make(name, given, provider),
            host=options.host,
            port=options.port,
            token=token,
            limits=HostLimits(rollouts=options.rollouts),
            options=given,
            register=options.register,
            url=options.url,
        )
    finally:
        await provider.close()


def _make(name: str, options: dict[str, Any], provider: SandboxProvider | None) -> TaskService:
    if ":" in name:
        return import_task(name, options, provider)
    return create_task(name, options, provider)


def _sandbox(given: dict[str, Any]) -> SandboxTable:
    try:
        return SandboxTable.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(("sandbox", *map(str, first["loc"])))
        known = ", ".join(SandboxTable.model_fields)
        remedy = f"; known: {known}" if first["type"] == "extra_forbidden" else ""
        raise UserError(f"--set {place}: {first['msg']}{remedy}") from error
