"""vLLM as an engine, through the token-in token-out route of its HTTP server.

Source: vLLM 0.32, `entrypoints/scale_out/token_in_token_out`, `entrypoints/rl/online` and
`entrypoints/serve/dev`. What of `SamplingParams` it does and does not do, and what was found out
about it, is in docs/adapters.md. Nothing here imports torch or vLLM.
"""

import math
from collections.abc import Iterator, Sequence
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
    SamplingParams,
)
from headrace.errors import UserError
from headrace.rollout.types import Span

_KEY_PREFIX = "generate-tokens-"
"""What the server puts before a request's id, and wants to see when one is aborted."""
_NO_LOGPROB = -9999.0
"""What the server sends for NaN and for minus infinity."""
_COLDEST, _HOTTEST = 0.01, 2.0
"""It raises temperatures between 0 and the first silently, and refuses those above the second."""
_SEED_MASK = (1 << 63) - 1
"""It takes -1 for no seed and hands others to a 64-bit generator."""
_PROCESSED = "processed_logprobs"


class _Scored(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list["_Scored"] = []


class _Scores(msgspec.Struct):
    content: list[_Scored] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str | None
    token_ids: list[int] | None
    logprobs: _Scores | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_VersionSpan] | None = None


class _PromptScore(msgspec.Struct):
    logprob: float


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _PromptScore] | None] | None = None
    usage: _Usage | None = None


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _ModelConfig(msgspec.Struct):
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False


class _SchedulerConfig(msgspec.Struct):
    policy: str = "fcfs"


class _ServerConfig(msgspec.Struct):
    model_config: _ModelConfig
    scheduler_config: _SchedulerConfig


class _ServerInfo(msgspec.Struct):
    vllm_config: _ServerConfig


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Paused(msgspec.Struct):
    is_paused: bool


class _Success(msgspec.Struct):
    success: bool


class VllmEngine(PausingEngine):
    """A vLLM server. `server_commands` says how to start one that can do everything.

    Args:
        url: of the server.
        model: checkpoint directory it serves, as this machine sees it.
        reload_experts: trust the server to reload models with experts or latent attention in place.
            On CPU it silently computes something else for the former and ends on the latter.
        options: as `HttpEngine`.
    """

    def __init__(
        self, url: str, model: str | Path, *, reload_experts: bool = False, **options: Any
    ) -> None:
        super().__init__(url, checkpoint=ServedCheckpoint(model), name="vLLM", **options)
        self._reload_experts = reload_experts
        self._config = _ServerConfig(_ModelConfig(), _SchedulerConfig())
        self._can_update = False

    # -- connecting --------------------------------------------------------------------------

    async def _ready(self) -> bool:
        return await self._http.answers("/health")

    async def _connect(self) -> tuple[int, int | None]:
        models = await self._http.get("/v1/models", _Models)
        if not models.data or models.data[0].max_model_len is None:
            raise UserError(f"{self._http.url}: does not say its context; is it a vLLM server?")
        if not await self._http.has("/inference/v1/generate"):
            raise UserError(
                f"vLLM at {self._http.url} has no /inference/v1/generate; start it with "
                "--enable-scale-out"
            )
        self._can_update = await self._http.has("/collective_rpc")
        version = None
        if self._can_update:
            info = await self._http.get("/server_info?config_format=json", _ServerInfo)
            self._config = info.vllm_config
            if (await self._http.get("/is_paused", _Paused)).is_paused:
                raise UserError(
                    f"vLLM at {self._http.url} is paused, so an update may have been left halfway; "
                    "start it again"
                )
            version = version_of(await self._label())
        self._require_same_model(models.data[0])
        return models.data[0].max_model_len, version

    def _require_same_model(self, served: _Model) -> None:
        """Another model's tokenizer would make sense of nothing, without any error."""
        root = Path(served.root or served.id)
        if self._checkpoint is not None and (root / "config.json").is_file():
            self._checkpoint.require_same_tensors(ServedCheckpoint(root))

    async def _label(self) -> str:
        return (await self._http.get("/weight_info", _WeightInfo)).weight_version

    async def _stamp(self, version: int) -> None:
        if self._can_update:
            await self._http.post("/update_weight_version", {"new_version": str(version)})

    # -- requests ----------------------------------------------------------------------------

    def _unsupported(self, request: GenerationRequest) -> Iterator[str]:
        sampling, raw, config = request.sampling, samples_raw(request.sampling), self._config
        if 0 < sampling.temperature < _COLDEST or sampling.temperature > _HOTTEST:
            yield (
                f"temperature is {sampling.temperature}; it takes 0 (greedy) and {_COLDEST} to "
                f"{_HOTTEST}"
            )
        if sampling.temperature and sampling.min_p and sampling.top_p < 1:
            yield "it applies min_p before top_p, which keeps other tokens; use one of them"
        if not raw and config.model_config.logprobs_mode != _PROCESSED:
            yield (
                "its logprobs are of the model's own distribution and not of the one that is "
                f"sampled from; start it with --logprobs-mode {_PROCESSED} (and "
                "VLLM_SERVER_DEV_MODE=1, so that it says so), or sample at temperature 1 without "
                "filters, penalties and bias"
            )
        if sampling.logprobs and not raw:
            yield "logprobs (alternatives) are raw only at temperature 1 and without filters"
        elif sampling.logprobs >= config.model_config.max_logprobs:
            yield (
                f"logprobs is {sampling.logprobs}; start it with --max-logprobs "
                f"{sampling.logprobs + 1}"
            )
        if sampling.stop and config.model_config.skip_tokenizer_init:
            yield "stop needs its tokenizer; start it without --skip-tokenizer-init"
        if sampling.grammar:
            yield "grammar is not supported by this adapter; leave it out"
        if request.priority and config.scheduler_config.policy != "priority":
            yield f"priority is {request.priority}; start it with --scheduling-policy priority"

    async def _ask(
        self, key: str, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Answer:
        path, body = "/inference/v1/generate", self._body(key, request)
        content = await self._http.post(path, body, timeout_s=None)
        generated = self._http.read(path, content, _Generated)
        try:
            return self._answer(request, generated)
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise EngineError(
                EngineError.FAILED, f"vLLM: {path}: unexpected answer ({error!r})"
            ) from error

    def _body(self, key: str, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "min_tokens": sampling.min_tokens,
            # It refuses ids past the vocabulary; none of them can be sampled.
            "stop_token_ids": [i for i in sampling.stop_ids if i < self._vocab],
            # The stop ids are the request's alone.
            "ignore_eos": True,
            # It lists the sampled token first and cuts the list to as many as were asked for.
            "logprobs": sampling.logprobs + 1 if sampling.logprobs else 0,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed & _SEED_MASK
        if sampling.logit_bias:
            params["logit_bias"] = sampling.logit_bias
        if sampling.stop:
            params["stop"] = sampling.stop
        if sampling.prompt_logprobs is not None:
            params["prompt_logprobs"] = sampling.prompt_logprobs
        body: dict[str, Any] = {
            "request_id": key,
            "token_ids": request.prompt_ids,
            "sampling_params": params,
            # Law L8 twice over: an update empties the cache, and versions share nothing in it.
            "cache_salt": f"version-{self._version}",
        }
        if request.priority:
            body["priority"] = -request.priority  # there, lower goes first
        return body

    def _answer(self, request: GenerationRequest, generated: _Generated) -> Answer:
        (choice,) = generated.choices
        ids = tuple(choice.token_ids or ())
        content = (choice.logprobs.content or []) if choice.logprobs is not None else []
        if [row.token_id for row in content] != list(ids):
            raise ValueError("logprobs are of other tokens than those sampled")
        logprobs = tuple(row.logprob for row in content)
        if not all(math.isfinite(p) and p > _NO_LOGPROB for p in logprobs):
            raise EngineError(
                EngineError.FAILED,
                "vLLM sampled a token without a finite logprob; look at the model",
            )
        sampling = request.sampling
        scores, others = _prompt_scores(request, generated.prompt_logprobs)
        details = generated.usage.prompt_tokens_details if generated.usage is not None else None
        return Answer(
            ids,
            logprobs,
            finish_reason(choice.finish_reason, "vLLM"),
            spans=self._spans(ids, logprobs, choice.weight_versions),
            raw_logprobs=logprobs if samples_raw(sampling) else (),
            alternatives=tuple(
                _likeliest([(row.token_id, row.logprob) for row in at.top_logprobs], sampling)
                for at in content
            )
            if sampling.logprobs
            else (),
            prompt_logprobs=scores,
            prompt_alternatives=others,
            stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
            reused_tokens=(details.cached_tokens or 0) if details is not None else 0,
        )

    def _spans(
        self,
        ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        versions: Sequence[_VersionSpan] | None,
    ) -> tuple[Span, ...] | None:
        """Spans as the server stamped them; None if it did not, or not with numbers."""
        spans, at = [], 0
        for part in versions or ():
            version = version_of(part.version)
            if version is None or part.start != at or part.end < at:
                return None
            at = part.end
            if part.end > part.start:
                where = slice(part.start, part.end)
                spans.append(Span(ids[where], logprobs[where], version, self._engine_id))
        return tuple(spans) if at == len(ids) else None

    async def _abort_at_server(self, key: str) -> None:
        body = {"request_ids": [_KEY_PREFIX + key]}
        await self._http.post("/inference/v1/abort_requests", body)

    # -- new weights -------------------------------------------------------------------------

    def _refuse_update(self, checkpoint: ServedCheckpoint) -> None:
        if not self._can_update:
            raise EngineError(
                EngineError.INVALID,
                f"vLLM at {self._http.url} takes no new weights; start it with "
                "VLLM_SERVER_DEV_MODE=1",
            )
        if self._reload_experts:
            return
        kind = "experts" if checkpoint.has_experts else "latent attention"
        if checkpoint.has_experts or checkpoint.has_latent_attention:
            raise EngineError(
                EngineError.INVALID,
                f"vLLM does not reload a model with {kind} in place as it should; start it again "
                "with the new weights, use the embedded engine, or say reload_experts=True if your "
                "server was checked",
            )

    async def _pause(self, policy: UpdatePolicy) -> None:
        mode = "keep" if policy == "continue" else "abort"
        # Clearing the cache includes what running requests hold: they compute it again.
        params = {"mode": mode, "clear_cache": "true"}
        await self._http.post("/pause", params=params)

    async def _reload(self, path: str, version: int) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._http.post("/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        where = "/reset_prefix_cache"
        params = {"reset_running_requests": "true", "reset_external": "true"}
        content = await self._http.post(where, params=params)
        if not self._http.read(where, content, _Success).success:
            raise EngineError(EngineError.FAILED, "its prefix cache could not be emptied")
        await self._stamp(version)
        if (label := await self._label()) != str(version):
            raise EngineError(EngineError.FAILED, f"it says its weights are {label!r}")

    async def _resume(self) -> None:
        await self._http.post("/resume")
        if (await self._http.get("/is_paused", _Paused)).is_paused:
            raise EngineError(EngineError.FAILED, "vLLM is still paused after /resume")


def _likeliest(rows: list[tuple[int, float]], sampling: SamplingParams) -> Alternatives:
    return tuple(sorted(rows, key=lambda row: -row[1])[: sampling.logprobs])


def _prompt_scores(
    request: GenerationRequest, rows: list[dict[int, _PromptScore] | None] | None
) -> tuple[tuple[float, ...], tuple[Alternatives, ...]]:
    """Of every prompt token: its logprob, and the likeliest ids in its place."""
    most = request.sampling.prompt_logprobs
    if most is None or rows is None:
        return (), ()
    scores, others = [], []
    for token, row in zip(request.prompt_ids, rows, strict=True):
        scores.append(math.nan if row is None else row[token].logprob)
        known = sorted((row or {}).items(), key=lambda item: -item[1].logprob)[:most]
        others.append(tuple((other, score.logprob) for other, score in known))
    return tuple(scores), tuple(others) if most else ()
