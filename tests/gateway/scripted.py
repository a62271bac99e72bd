"""A scripted engine and small tokenizers for gateway tests."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from headrace.engine.config import UpdatePolicy
from headrace.engine.types import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
    Progress,
)
from headrace.rollout.types import FinishReason, Span
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import SMALLEST_VOCABULARY, train_tokenizer

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}

CORPUS = [
    "Use bash, then answer.\ntools: bash",
    "how many lines are in notes.txt? bash command wc -l < notes.txt there are 12 lines",
    "count the files in the folder docs and answer with a number",
] * 20

Script = Callable[[GenerationRequest], GenerationResult]


def byte_tokenizer() -> TextTokenizer:
    """No merges at all: one token per byte, so text and ids are one to one."""
    return train_tokenizer([], SMALLEST_VOCABULARY)


def merged_tokenizer() -> TextTokenizer:
    """A real BPE, in which many id sequences spell the same text."""
    return train_tokenizer(CORPUS, 360)


def chatml_tokenizer() -> TextTokenizer:
    """The same BPE with ChatML's two tokens and the plain ChatML template instead of GLM's."""
    spec = json.loads(merged_tokenizer()._tokenizer.to_str())
    spec["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
    )
    return TextTokenizer(tokenizer, name_or_path="chatml", config={"chat_template": template})


class ScriptedEngine:
    """An `EngineClient` that answers from a script and remembers what it read and wrote."""

    def __init__(self, script: Script, *, max_context: int = 4096) -> None:
        self.script = script
        self.max_context = max_context
        self.weight_version = 0
        self.requests: list[GenerationRequest] = []
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """(prompt ids, output ids) of every finished request."""
        self.gate: asyncio.Event | None = None
        """While set to an unset event, requests wait for it (or for their abort)."""
        self.entered = asyncio.Semaphore(0)
        """Released once for each request that has arrived."""
        self.finished: asyncio.Queue[str] = asyncio.Queue()
        """Ids of finished requests."""
        self.replay: list[list[int]] = []
        """Ids told to who watches before the request begins again and goes by the script."""
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        self.requests.append(request)
        aborted = self._aborted.setdefault(request.id, asyncio.Event())
        self.entered.release()
        if self.gate is not None and not self.gate.is_set():
            waits = [asyncio.create_task(event.wait()) for event in (self.gate, aborted)]
            await asyncio.wait(waits, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        result = self.script(request)
        if aborted.is_set():
            result = GenerationResult(result.id, result.spans[:1], FinishReason.ABORTED)
        if on_progress is not None:
            for ids in self.replay:
                on_progress(Progress(request.id, tuple(ids), (-1.0,) * len(ids), (), 0))
                on_progress(Progress(request.id, (), (), (), 1, restart=True))
            for span in result.spans:
                for token, logprob in zip(span.ids, span.logprobs, strict=True):
                    on_progress(Progress(request.id, (token,), (logprob,), (), span.weight_version))
                    await asyncio.sleep(0)
        self.log.append((request.prompt_ids, tuple(i for s in result.spans for i in s.ids)))
        self.finished.put_nowait(request.id)
        return result

    async def abort(self, request_id: str) -> None:
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        self.weight_version = version

    async def stats(self) -> dict[str, Any]:
        return {"version": self.weight_version, "requests_finished": len(self.log)}

    async def close(self) -> None:
        return


_logprob = itertools.count(1)


def spans(*runs: list[int], version: int = 0) -> tuple[Span, ...]:
    """One span for each non-empty run, versions counting up, every logprob unique."""
    return tuple(
        Span(tuple(run), tuple(-next(_logprob) / 1e6 for _ in run), version + i, "scripted")
        for i, run in enumerate(filter(None, runs))
    )


def answers(*outputs: list[int]) -> Script:
    """A script that samples these ids, one list per request, the last one for ever."""
    queue = list(outputs)

    def script(request: GenerationRequest) -> GenerationResult:
        ids = queue.pop(0) if len(queue) > 1 else queue[0]
        stopped = bool(ids) and ids[-1] in request.sampling.stop_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return GenerationResult(request.id, spans(ids), reason)

    return script


def refuses(code: str) -> Script:
    """A script that refuses every request."""

    def script(request: GenerationRequest) -> GenerationResult:
        raise EngineError(code, f"scripted {code}")

    return script
