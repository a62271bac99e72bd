"""SGLang as an engine, through the native routes of its HTTP server.

Source: SGLang's documentation (native API, sampling parameters) and the request types of its
server (`GenerateReqInput`, `PauseGenerationReqInput`, `UpdateWeightFromDiskReqInput`). It says of a
finished request which weights it held at the end, so that versions are bounded and not stamped; see
docs/adapters.md. Nothing here imports torch or SGLang.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.config import UpdatePolicy
from headrace.engine.servers.answer import Answer, finish_reason, samples_raw, version_of
from headrace.engine.servers.checkpoint import ServedCheckpoint
from headrace.engine.servers.updates import LOAD_TIMEOUT_S, PausingEngine
from headrace.engine.types import (
    Alternatives,
    EngineError,
    GenerationRequest,
    OnProgress,
)
from headrace.errors import UserError

_SEED_MASK = (1 << 63) - 1
_LABEL_UNSET = "default"

_Scored = tuple[float | None, int, str | None]
"""Logprob, id, text."""


class _Ended(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Ended | None = None
    weight_version: str | None = None
    cached_tokens: int = 0
    output_token_logprobs: list[_Scored] | None = None
    output_top_logprobs: list[list[_Scored] | None] | None = None
    input_token_logprobs: list[_Scored] | None = None
    input_top_logprobs: list[list[_Scored] | None] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


class _ModelInfo(msgspec.Struct):
    model_path: str
    is_generation: bool = True
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    context_length: int | None = None
    skip_tokenizer_init: bool = False
    enable_deterministic_inference: bool = False


class _Done(msgspec.Struct):
    success: bool = True
    message: str = ""


class SglangEngine(PausingEngine):
    """An SGLang server. `server_commands` says how to start one that can do everything.

    Args:
        url: of the server.
        model: checkpoint directory it serves, as this machine sees it.
        options: as `HttpEngine`.
    """

    def __init__(self, url: str, model: str | Path, **options: Any) -> None:
        super().__init__(url, checkpoint=ServedCheckpoint(model), name="SGLang", **options)
        self._info = _ServerInfo()

    # -- connecting --------------------------------------------------------------------------

    async def _ready(self) -> bool:
        return await self._http.answers("/health")

    async def _connect(self) -> tuple[int, int | None]:
        model = await self._model_info()
        if not model.is_generation:
            raise UserError(f"SGLang at {self._http.url}: {model.model_path} does not generate")
        # The route lost its "get_" in later versions.
        newer = await self._http.answers("/server_info")
        path = "/server_info" if newer else "/get_server_info"
        self._info = await self._http.get(path, _ServerInfo)
        assert self._checkpoint is not None, "given by the constructor"
        root = Path(model.model_path)
        if (root / "config.json").is_file():
            self._checkpoint.require_same_tensors(ServedCheckpoint(root))
        context = self._info.context_length or self._checkpoint.max_positions
        return context, _number(model.weight_version)

    async def _model_info(self) -> _ModelInfo:
        try:
            return await self._http.get("/model_info", _ModelInfo)
        except EngineError as error:
            if error.code == EngineError.CLOSED:
                raise
            return await self._http.get("/get_model_info", _ModelInfo)

    async def _stamp(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._http.post("/update_weight_version", body)

    # -- requests ----------------------------------------------------------------------------

    def _unsupported(self, request: GenerationRequest) -> Iterator[str]:
        sampling, greedy = request.sampling, request.sampling.temperature == 0
        for name, off in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            if not greedy and getattr(sampling, name) != off:
                yield (
                    f"{name} is {getattr(sampling, name)}; its logprobs are those before filters, "
                    "not those of what is sampled from: sample with a temperature alone"
                )
        if sampling.repetition_penalty != 1:
            yield (
                f"repetition_penalty is {sampling.repetition_penalty}; it leaves the ids of the "
                "prompt out, so the number means another thing there: leave it at 1"
            )
        seeded = sampling.seed is not None and not greedy
        if seeded and not self._info.enable_deterministic_inference:
            yield (
                f"seed is {sampling.seed}; it ignores seeds unless it is started with "
                "--enable-deterministic-inference"
            )
        if self._info.skip_tokenizer_init:
            for name in ("stop", "min_tokens"):
                if getattr(sampling, name):
                    yield f"{name} needs its tokenizer; start it without --skip-tokenizer-init"
        if sampling.logprobs and not samples_raw(sampling):
            yield "logprobs (alternatives) are raw only at temperature 1, without penalties or bias"
        if sampling.grammar:
            yield "grammar is not supported by this adapter; leave it out"
        if request.priority:
            yield f"priority is {request.priority}; this adapter has no priorities for it"

    async def _ask(
        self, key: str, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Answer:
        content = await self._http.post("/generate", self._body(key, request), timeout_s=None)
        generated = self._http.read("/generate", content, _Generated)
        try:
            return self._answer(request, generated)
        except (ValueError, IndexError, TypeError) as error:
            raise EngineError(
                EngineError.FAILED, f"SGLang: /generate: unexpected answer ({error!r})"
            ) from error

    def _body(self, key: str, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        # It would cut the output of a request that is too long, or refuse it, by version.
        room = self._max_context - len(request.prompt_ids)
        params: dict[str, Any] = {
            "max_new_tokens": min(sampling.max_tokens, room),
            "min_new_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": [i for i in sampling.stop_ids if i < self._vocab],
            # The stop ids are the request's alone, and the one that was sampled is kept.
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None and sampling.temperature:
            params["sampling_seed"] = sampling.seed & _SEED_MASK
        if sampling.logit_bias:
            params["logit_bias"] = {str(i): bias for i, bias in sampling.logit_bias.items()}
        if sampling.stop:
            params["stop"] = sampling.stop
        scored = sampling.prompt_logprobs is not None
        return {
            "rid": key,
            "input_ids": request.prompt_ids,
            "sampling_params": params,
            "stream": False,
            "return_logprob": True,
            "logprob_start_len": 0 if scored else -1,
            "top_logprobs_num": max(sampling.logprobs, sampling.prompt_logprobs or 0),
        }

    def _answer(self, request: GenerationRequest, generated: _Generated) -> Answer:
        meta, sampling = generated.meta_info, request.sampling
        if meta.finish_reason is None:
            raise ValueError("no finish_reason")
        rows = meta.output_token_logprobs or []
        ids = tuple(row[1] for row in rows)
        if generated.output_ids is not None and tuple(generated.output_ids) != ids:
            raise ValueError("logprobs are of other tokens than those sampled")
        logprobs = tuple(math.nan if row[0] is None else row[0] for row in rows)
        if not all(math.isfinite(p) for p in logprobs):
            raise EngineError(
                EngineError.FAILED,
                "SGLang sampled a token without a finite logprob; look at the model",
            )
        self._note_label(request.id, meta.weight_version)
        matched = meta.finish_reason.matched
        scores, others = _prompt_scores(request, meta)
        return Answer(
            ids,
            logprobs,
            finish_reason(meta.finish_reason.type, "SGLang"),
            raw_logprobs=logprobs if samples_raw(sampling) else (),
            alternatives=tuple(
                _alternatives(row, sampling.logprobs) for row in meta.output_top_logprobs or ()
            )
            if sampling.logprobs
            else (),
            prompt_logprobs=scores,
            prompt_alternatives=others,
            stop=matched if isinstance(matched, str) else None,
            reused_tokens=meta.cached_tokens,
        )

    def _note_label(self, request_id: str, label: str | None) -> None:
        """A version that this client did not load means that somebody else did, during this."""
        version = _number(label)
        call = self._open.get(request_id)
        if version is not None and call is not None:
            call.widen(version)

    async def _abort_at_server(self, key: str) -> None:
        await self._http.post("/abort_request", {"rid": key})

    # -- new weights -------------------------------------------------------------------------

    async def _pause(self, policy: UpdatePolicy) -> None:
        # Retracted requests wait without their keys and values and compute them again. Those that
        # are paused "in_place" would keep the old ones.
        mode = "retract" if policy == "continue" else "abort"
        await self._http.post("/pause_generation", {"mode": mode}, timeout_s=LOAD_TIMEOUT_S)

    async def _reload(self, path: str, version: int) -> None:
        body = {
            "model_path": path,
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": True,
        }
        where = "/update_weights_from_disk"
        content = await self._http.post(where, body, timeout_s=LOAD_TIMEOUT_S)
        done = self._http.read(where, content, _Done)
        if not done.success:
            raise EngineError(EngineError.FAILED, done.message or "it does not say why")
        # Versions before 0.5 do not flush by themselves. One that cannot answers with an error.
        await self._http.post("/flush_cache")
        label = (await self._model_info()).weight_version
        if label != str(version):
            raise EngineError(EngineError.FAILED, f"it says its weights are {label!r}")

    async def _resume(self) -> None:
        await self._http.post("/continue_generation", {})


def _number(label: str | None) -> int | None:
    return None if label is None or label == _LABEL_UNSET else version_of(label)


def _alternatives(row: list[_Scored] | None, most: int) -> Alternatives:
    rows = [(at[1], at[0]) for at in row or () if at[0] is not None]
    return tuple(sorted(rows, key=lambda at: -at[1])[:most])


def _prompt_scores(
    request: GenerationRequest, meta: _Meta
) -> tuple[tuple[float, ...], tuple[Alternatives, ...]]:
    """Of every prompt token: its logprob, and the likeliest ids in its place."""
    most = request.sampling.prompt_logprobs
    if most is None or meta.input_token_logprobs is None:
        return (), ()
    if [row[1] for row in meta.input_token_logprobs] != list(request.prompt_ids):
        raise ValueError("input_token_logprobs are of other tokens than the prompt's")
    scores = [math.nan if row[0] is None else row[0] for row in meta.input_token_logprobs]
    if not most:
        return tuple(scores), ()
    others = [_alternatives(row, most) for row in meta.input_top_logprobs or ()]
    return tuple(scores), tuple(others)
