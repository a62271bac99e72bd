"""A local web page over a run directory until Ctrl-C: what `headrace dashboard` stands on."""

import asyncio
import contextlib
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from headrace.http.server import ConnectionLimits, HttpServer
from headrace.observe.dashboard.app import Desk, create_app
from headrace.observe.dashboard.source import RunSource
from headrace.serving import cancel_on_signals

HOSTS = ("127.0.0.1", "localhost")
"""Names under which the page may be opened; others on the network cannot reach it at all."""


def dashboard_forever(run_dir: Path, *, port: int, console: Console) -> int:
    """Serve until interrupted; returns the exit code.

    Args:
        run_dir: the run; it may go on, be finished or have crashed.
        port: TCP port on loopback; 0 picks a free one.
        console: where the address is printed.

    Raises:
        UserError: no run there, or the port is taken.
    """
    asyncio.run(_serve(run_dir, port, console))
    return 0


async def _serve(run_dir: Path, port: int, console: Console) -> None:
    cancel_on_signals()
    with contextlib.suppress(asyncio.CancelledError):
        async with contextlib.AsyncExitStack() as stack:
            desk = Desk(lambda: RunSource(run_dir))
            stack.callback(desk.close)
            server = await HttpServer.start(
                create_app(desk, hosts=HOSTS),
                port=port,
                name="dashboard",
                limits=ConnectionLimits(connections=64),
            )
            stack.push_async_callback(server.stop)
            console.print(f"Dashboard: {server.url}", highlight=False, soft_wrap=True)
            console.print(f"of {escape(str(run_dir))}; Ctrl-C stops it.", soft_wrap=True)
            await asyncio.Event().wait()
    console.print("Stopped.")
