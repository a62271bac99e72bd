"""The engine's process loop: take requests from a connection, step the core, answer what ended.

One loop serves both the subprocess that `cluster` starts and the thread behind `LocalEngine`; they
differ only in the connection. While there is work the loop never blocks; without work it sleeps in
`poll` until a request comes.
"""

import os
from typing import Any, Protocol

import msgspec
import torch

from headrace import ops
from headrace.cluster.types import Request
from headrace.engine.config import USER_ERROR, EngineConfig
from headrace.engine.core import EngineCore, GenerationFailure
from headrace.engine.types import EngineError, GenerationRequest, GenerationResult
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint
from headrace.model.shared_folder import is_published
from headrace.model.shared_weights import load_shared

_IDLE_POLL_S = 1.0
_CALLER_WAIT_S = 60.0


class Connection(Protocol):
    """Where requests come from and answers go. `closed` turns True when the caller hangs up."""

    closed: bool

    def poll(self, timeout_s: float) -> Request | None: ...

    def reply(self, request_id: int, result: Any = None) -> None: ...

    def fail(self, request_id: int, code: str, message: str) -> None: ...


class EngineWorker:
    """Serves one `EngineCore` over a connection until it closes or `shutdown` is asked for.

    Methods and payloads (all msgpack-able):
        generate: a GenerationRequest as dict -> a GenerationResult as dict, when it ends
        abort: {"id"} -> None
        load_weights: {"path", "version", "policy": see `EngineCore.load_weights`} -> {"version"}
        stats: {} -> EngineStats as dict, plus "max_context" and "pid"
        shutdown: {} -> None; open requests are aborted and answered first

    Args:
        connection: see `Connection`.
        checkpoint: directory of the first weights, of a checkpoint or published; ignored if
            `core` is given.
        version: stamp of those weights.
        config: EngineConfig as dict.
        threads: compute threads of this process.
        core: a ready core instead of a checkpoint, for use inside one process.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        checkpoint: str = "",
        version: int = 0,
        config: dict[str, Any] | None = None,
        threads: int | None = None,
        core: EngineCore | None = None,
    ) -> None:
        self._connection = connection
        self._checkpoint = checkpoint
        self._version = version
        self._config = msgspec.convert(config or {}, EngineConfig)
        self._core = core
        # Request ids of open generate calls, by generation id.
        self._callers: dict[str, int] = {}
        self._stopping = False
        if threads is not None:
            torch.set_num_threads(threads)

    def run(self) -> None:
        """Serve until the end. Returns; never raises for a request's fault."""
        connection = self._connection
        core = self._core or self._start()
        if core is None:
            return
        while not connection.closed and not (self._stopping and not core.has_work):
            request = connection.poll(0.0 if core.has_work else _IDLE_POLL_S)
            while request is not None:
                self._handle(core, request)
                request = connection.poll(0.0)
            if core.has_work:
                self._deliver(core.step())

    def _start(self) -> EngineCore | None:
        """Load the first weights; a user's mistake is told to whoever asks first."""
        try:
            # Compiling the ops would otherwise happen inside somebody's first request.
            ops.prepare("cpu")
            load = load_shared if is_published(self._checkpoint) else load_checkpoint
            model = load(self._checkpoint, dtype=getattr(torch, self._config.dtype))
            return EngineCore(model, self._config, version=self._version)
        except (UserError, ValueError) as error:
            request = self._connection.poll(_CALLER_WAIT_S)
            while request is not None:
                self._connection.fail(request.id, USER_ERROR, str(error))
                request = self._connection.poll(0.0)
            return None

    def _deliver(self, results: list[GenerationResult | GenerationFailure]) -> None:
        for ended in results:
            caller = self._callers.pop(ended.id, None)
            if caller is None:
                continue
            if isinstance(ended, GenerationFailure):
                self._connection.fail(caller, ended.code, ended.message)
            else:
                self._connection.reply(caller, msgspec.to_builtins(ended))

    def _handle(self, core: EngineCore, request: Request) -> None:
        try:
            self._dispatch(core, request)
        except EngineError as error:
            self._connection.fail(request.id, error.code, str(error))
        except UserError as error:
            self._connection.fail(request.id, USER_ERROR, str(error))
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            message = f"{request.method}: malformed payload ({error})"
            self._connection.fail(request.id, EngineError.INVALID, message)

    def _dispatch(self, core: EngineCore, request: Request) -> None:
        payload, reply = request.payload, self._connection.reply
        match request.method:
            case "generate":
                if self._stopping:
                    raise EngineError(EngineError.CLOSED, "the engine is shutting down")
                generation = msgspec.convert(payload, GenerationRequest)
                core.add(generation)
                self._callers[generation.id] = request.id
            case "abort":
                core.abort(payload["id"])
                # Answered at once: the caller may use the id again right after.
                self._deliver(core.collect())
                reply(request.id)
            case "load_weights":
                policy = payload.get("policy", "continue")
                core.load_weights(payload["path"], payload["version"], policy)
                reply(request.id, {"version": core.version})
            case "stats":
                stats = msgspec.to_builtins(core.stats())
                stats["max_context"] = core.config.max_context
                stats["pid"] = os.getpid()
                reply(request.id, stats)
            case "shutdown":
                self._stopping = True
                for generation_id in list(self._callers):
                    core.abort(generation_id)
                reply(request.id)
            case other:
                raise EngineError(EngineError.INVALID, f"unknown method {other!r}")
