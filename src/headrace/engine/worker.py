"""The engine's process loop: take requests from a connection, step the core, answer what ended.

One loop serves both the subprocess that `cluster` starts and the thread behind `LocalEngine`; they
differ only in the connection. While there is work the loop never blocks; without work it sleeps in
`poll` until a request comes.
"""

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from headrace import ops
from headrace.cluster.types import Request
from headrace.engine.cache.handover import Handover, Prefilled
from headrace.engine.cache.transfer import Adoption
from headrace.engine.config import USER_ERROR, EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import (
    EngineError,
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    Progress,
    SamplingParams,
    Told,
)
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint
from headrace.model.shared_folder import is_published
from headrace.model.shared_weights import load_shared
from headrace.rollout.types import FinishReason
from headrace.tokens.pieces import tag_ids, token_pieces

_IDLE_POLL_S = 1.0
_CALLER_WAIT_S = 60.0


class Connection(Protocol):
    """Where requests come from and answers go. `closed` turns True when the caller hangs up."""

    closed: bool

    def poll(self, timeout_s: float) -> Request | None: ...

    def reply(self, request_id: int, result: Any = None, more: bool = False) -> None: ...

    def fail(self, request_id: int, code: str, message: str) -> None: ...


class EngineWorker:
    """Serves one `EngineCore` over a connection until it closes or `shutdown` is asked for.

    Methods and payloads (all msgpack-able):
        generate: a GenerationRequest as dict -> a GenerationResult as dict, when it ends; before
            that, if it streams, a Progress as dict after each step that sampled for it
        abort: {"id"} -> None
        held: {"ids"} -> {"tokens"}: see `Handovers.held`
        prefill: {"request": a GenerationRequest as dict, "first", "path"} -> a `Prefilled` as dict:
            its prompt was computed, without the last token, and is in that file from position
            "first" on
        adopt: {"ids", "handover": a Handover as dict} -> {"tokens"}: as "held", when it is taken in
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
        tokenizer: directory of the tokenizer, read when the first request has stop texts or a
            grammar; empty is `checkpoint`.
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
        tokenizer: str = "",
        core: EngineCore | None = None,
    ) -> None:
        self._connection = connection
        self._checkpoint = checkpoint
        self._version = version
        self._config = msgspec.convert(config or {}, EngineConfig)
        self._tokenizer = tokenizer or checkpoint
        self._core = core
        # Request ids of open generate calls, by generation id.
        self._callers: dict[str, int] = {}
        # Of them, those whose prompt is to be handed over: what does that.
        self._exports: dict[str, Callable[[], Handover | None]] = {}
        # Handovers that are being taken in, oldest first, and who waits for them.
        self._adoptions: deque[tuple[int, Adoption]] = deque()
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
            busy = core.has_work or self._adoptions
            request = connection.poll(0.0 if busy else _IDLE_POLL_S)
            while request is not None:
                self._handle(core, request)
                request = connection.poll(0.0)
            self._adopt()
            if core.has_work:
                self._deliver(core.step())

    def _start(self) -> EngineCore | None:
        """Load the first weights; a user's mistake is told to whoever asks first."""
        try:
            # Compiling the ops would otherwise happen inside somebody's first request.
            ops.prepare("cpu")
            load = load_shared if is_published(self._checkpoint) else load_checkpoint
            model = load(self._checkpoint, dtype=getattr(torch, self._config.dtype))
            return EngineCore(
                model,
                self._config,
                version=self._version,
                pieces=partial(token_pieces, self._tokenizer),
                tags=partial(tag_ids, self._tokenizer),
            )
        except (UserError, ValueError) as error:
            request = self._connection.poll(_CALLER_WAIT_S)
            while request is not None:
                self._connection.fail(request.id, USER_ERROR, str(error))
                request = self._connection.poll(0.0)
            return None

    def _deliver(self, told: list[Told]) -> None:
        for item in told:
            going_on = isinstance(item, Progress)
            caller = self._callers.get(item.id) if going_on else self._callers.pop(item.id, None)
            if caller is None:
                continue
            if isinstance(item, GenerationFailure):
                self._exports.pop(item.id, None)
                self._connection.fail(caller, item.code, item.message)
            elif isinstance(item, GenerationResult) and (
                export := self._exports.pop(item.id, None)
            ):
                self._connection.reply(caller, msgspec.to_builtins(_prefilled(item, export)))
            else:
                self._connection.reply(caller, msgspec.to_builtins(item), more=going_on)

    def _adopt(self) -> None:
        """Take in one piece of a handover: no more between two steps, which others wait for."""
        if self._adoptions:
            caller, adoption = self._adoptions[0]
            if not adoption.advance():
                self._adoptions.popleft()
                self._connection.reply(caller, {"tokens": adoption.held})

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

    def _generate(self, core: EngineCore, request: Request, generation: GenerationRequest) -> None:
        if self._stopping:
            raise EngineError(EngineError.CLOSED, "the engine is shutting down")
        core.add(generation)
        self._callers[generation.id] = request.id

    def _dispatch(self, core: EngineCore, request: Request) -> None:
        payload, reply = request.payload, self._connection.reply
        match request.method:
            case "generate":
                generation = msgspec.convert(payload, GenerationRequest)
                self._generate(core, request, generation)
            case "prefill":
                generation = msgspec.convert(payload["request"], GenerationRequest)
                ids, first, path = generation.prompt_ids[:-1], payload["first"], payload["path"]
                # A step samples after it has computed a prompt: what, does not matter.
                sampling = SamplingParams(max_tokens=1, temperature=0.0)
                generation = msgspec.structs.replace(generation, sampling=sampling, stream=False)
                self._generate(core, request, generation)
                self._exports[generation.id] = partial(
                    core.handovers.export, ids, first, Path(path)
                )
            case "held":
                reply(request.id, {"tokens": core.handovers.held(payload["ids"])})
            case "adopt":
                handover = msgspec.convert(payload["handover"], Handover)
                adoption = Adoption(core.handovers, payload["ids"], handover)
                self._adoptions.append((request.id, adoption))
            case "abort":
                core.abort(payload["id"])
                # Answered at once: the caller may use the id again right after.
                self._deliver(core.collect())
                reply(request.id)
            case "load_weights":
                policy = payload.get("policy", "continue")
                core.load_weights(payload["path"], payload["version"], policy)
                # Who watches learns of a restart before the caller learns of the new version.
                self._deliver(core.collect())
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


def _prefilled(ended: GenerationResult, export: Callable[[], Handover | None]) -> Prefilled:
    """Hand over what was computed: at once, since the next step may evict it."""
    done = ended.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    return Prefilled(export() if done else None, ended.reused_tokens, ended.queue_s)
