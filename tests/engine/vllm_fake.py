"""vLLM's HTTP routes as version 0.32 answers them, over a toy model.

Requests and answers follow what a real server was seen to send. What it does badly it does here,
too: an unknown prompt id or weights that are not there end it.
"""

from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from toy_server import ToyRequest, ToyServer

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def error(status: int, message: str, kind: str = "BadRequestError") -> JSONResponse:
    body = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": body}, status)


class VllmFake(ToyServer):
    """A server; `app` answers.

    Args:
        path: checkpoint directory.
        context: tokens.
        logprobs_mode, policy, scale_out, dev_mode, stamps: as it was started, or which version.
    """

    def __init__(
        self,
        path: str,
        context: int = 128,
        *,
        logprobs_mode: str = "processed_logprobs",
        policy: str = "priority",
        scale_out: bool = True,
        dev_mode: bool = True,
        stamps: bool = True,
    ) -> None:
        super().__init__(path, context)
        self.logprobs_mode, self.policy, self.stamps = logprobs_mode, policy, stamps
        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
        ]
        if scale_out:
            routes += [
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self.abort_requests, methods=["POST"]),
            ]
        if dev_mode:
            routes += [
                Route("/server_info", self.server_info),
                Route("/weight_info", self.weight_info),
                Route("/is_paused", self.is_paused),
                *(
                    Route(f"/{name}", getattr(self, name), methods=["POST"])
                    for name in (
                        "pause",
                        "resume",
                        "collective_rpc",
                        "reset_prefix_cache",
                        "update_weight_version",
                    )
                ),
            ]
        self.app = Starlette(routes=routes)

    async def health(self, _: Request) -> Response:
        return Response(status_code=503 if self.dead else 200)

    async def models(self, _: Request) -> Response:
        path = self.model.path
        data = [{"id": path, "object": "model", "root": path, "max_model_len": self.context}]
        return JSONResponse({"object": "list", "data": data})

    async def server_info(self, request: Request) -> Response:
        assert request.query_params["config_format"] == "json"
        model = {"logprobs_mode": self.logprobs_mode, "max_logprobs": 21}
        config = {
            "model_config": {**model, "skip_tokenizer_init": True},
            "scheduler_config": {"policy": self.policy},
        }
        return JSONResponse({"vllm_config": config})

    async def weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def is_paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": not self.moving.is_set()})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if "token_ids" not in body:
            return error(400, "1 validation error:\n  {'type': 'missing'}")
        if self.dead:
            return error(500, DEAD, "InternalServerError")
        self.bodies.append(body)
        params, prompt = body["sampling_params"], body["token_ids"]
        if problem := self.problem(body, params, prompt):
            return error(400, problem)
        if max(prompt) >= self.model.vocab:
            self.dead = True
            self.abort(list(self.requests))
            return error(500, DEAD, "InternalServerError")
        seed = params.get("seed")
        done = await self.run(
            "generate-tokens-" + body["request_id"],
            ToyRequest(
                prompt,
                params["max_tokens"],
                params["temperature"],
                None if seed == -1 else seed,
                tuple(params["stop_token_ids"]),
                params["min_tokens"],
                {int(token): bias for token, bias in params.get("logit_bias", {}).items()},
                params["top_k"],
            ),
        )
        return JSONResponse(self.answer(body, done))

    def problem(self, body: dict[str, Any], params: dict[str, Any], prompt: list[int]) -> str:
        if len(prompt) >= self.context:
            return (
                f"The decoder prompt (length {len(prompt)}) is longer than the maximum model "
                f"length of {self.context}."
            )
        for name in ("stop_token_ids", "logit_bias"):
            strange = [i for i in map(int, params.get(name, ())) if i >= self.model.vocab]
            if strange:
                return f"token_id(s) {strange} in {name} contain out-of-vocab token ids."
        if not 0 <= params["temperature"] <= 2:
            return f"temperature must be in [0, 2], got {params['temperature']}."
        if body.get("priority") and self.policy != "priority":
            return "Got priority but priority scheduling is not enabled."
        return ""

    def answer(self, body: dict[str, Any], done: ToyRequest) -> dict[str, Any]:
        params = body["sampling_params"]
        shown = done.processed if self.logprobs_mode == "processed_logprobs" else done.raw
        most = max(params["logprobs"], 1)
        content = []
        for token, scores in zip(done.ids, shown, strict=True):
            order = [token, *(i for i in np.argsort(-scores)[: params["logprobs"]] if i != token)]
            top = [{"token_id": int(i), "logprob": float(scores[i])} for i in order[:most]]
            content.append({**top[0], "rank": 1, "top_logprobs": top})
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": done.reason,
            "stop_reason": done.ids[-1] if done.reason == "stop" else None,
            "token_ids": done.ids,
            "logprobs": {"content": content},
            "weight_versions": self.version_spans(done.versions) if self.stamps else None,
        }
        scored = params.get("prompt_logprobs")
        return {
            "request_id": "generate-tokens-" + body["request_id"],
            "usage": {"prompt_tokens_details": {"cached_tokens": 0}},
            "choices": [choice],
            "prompt_logprobs": None if scored is None else self.prompt_scores(done, scored),
        }

    def prompt_scores(self, done: ToyRequest, most: int) -> list[dict[str, Any] | None]:
        rows: list[dict[str, Any] | None] = []
        for token, scores in zip(done.prompt, done.scores(self.model), strict=True):
            if scores is None:
                rows.append(None)
                continue
            shown = [token, *np.argsort(-scores)[:most]]
            rows.append({str(i): {"logprob": float(scores[i]), "rank": 1} for i in shown})
        return rows

    def version_spans(self, versions: list[str]) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for place, version in enumerate(versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": place})
            spans[-1]["end"] = place + 1
        return spans

    async def abort_requests(self, request: Request) -> Response:
        self.abort((await request.json())["request_ids"])
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = request.query_params["mode"]
        self.calls.append(f"pause {mode}")
        self.moving.clear()
        if mode == "abort":
            self.abort(list(self.requests))
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        self.calls.append("resume")
        self.moving.set()
        return JSONResponse({"status": "resumed"})

    async def collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        if "method" not in body:
            return JSONResponse({"detail": "Missing 'method' in request body"}, 400)
        assert body["method"] == "reload_weights"
        self.calls.append("reload")
        if self.dead:
            return error(500, DEAD, "InternalServerError")
        try:
            self.load(body["kwargs"]["weights_path"])
        except FileNotFoundError as problem:
            self.dead = True
            return error(500, f"Call to collective_rpc method failed: {problem}")
        except OSError as problem:
            return error(500, f"Call to collective_rpc method failed: {problem}")
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        self.calls.append("reset")
        if self.requests and request.query_params.get("reset_running_requests") != "true":
            return JSONResponse({"success": False})
        self.stale = False
        return JSONResponse({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        self.calls.append(f"label {self.label}")
        return JSONResponse({"success": True, "new_version": self.label})
