"""SGLang's native HTTP routes over a toy model, written from its documentation and request types.

Nothing was recorded from a real server, which does not run on every machine: whatever is not in its
documentation is not here, and unknown keys of a request are errors.
"""

from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from toy_server import ToyRequest, ToyServer

SAMPLING_KEYS = {
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "sampling_seed",
}  # fmt: skip
REQUEST_KEYS = {
    "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "stream",
}  # fmt: skip


class SglangFake(ToyServer):
    """A server; `app` answers.

    Args:
        path: checkpoint directory.
        context: tokens.
        deterministic, tokenizer: as it was started.
        old_names: routes with "get_" alone, as before version 0.5.
    """

    def __init__(
        self,
        path: str,
        context: int = 128,
        *,
        deterministic: bool = True,
        tokenizer: bool = True,
        old_names: bool = False,
    ) -> None:
        super().__init__(path, context)
        self.deterministic, self.tokenizer = deterministic, tokenizer
        prefixes = ("/get_",) if old_names else ("/get_", "/")
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                *(Route(f"{at}model_info", self.model_info) for at in prefixes),
                *(Route(f"{at}server_info", self.server_info) for at in prefixes),
                *(
                    Route(f"/{name}", getattr(self, name), methods=["POST"])
                    for name in (
                        "generate",
                        "abort_request",
                        "pause_generation",
                        "continue_generation",
                        "update_weights_from_disk",
                        "update_weight_version",
                        "flush_cache",
                    )
                ),
            ]
        )

    async def health(self, _: Request) -> Response:
        return Response()

    async def model_info(self, _: Request) -> Response:
        return JSONResponse(
            {
                "model_path": self.model.path,
                "tokenizer_path": self.model.path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.label,
            }
        )

    async def server_info(self, _: Request) -> Response:
        return JSONResponse(
            {
                "context_length": self.context,
                "skip_tokenizer_init": not self.tokenizer,
                "enable_deterministic_inference": self.deterministic,
            }
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        params = body["sampling_params"]
        assert set(body) <= REQUEST_KEYS, set(body) - REQUEST_KEYS
        assert set(params) <= SAMPLING_KEYS, set(params) - SAMPLING_KEYS
        if len(body["input_ids"]) >= self.context:
            message = (
                f"The input ({len(body['input_ids'])} tokens) is longer than the model's context "
                f"length ({self.context} tokens)."
            )
            return JSONResponse({"error": {"message": message}}, 400)
        toy = ToyRequest(
            body["input_ids"],
            params["max_new_tokens"],
            params["temperature"],
            params.get("sampling_seed") if self.deterministic else None,
            tuple(params["stop_token_ids"]),
            params["min_new_tokens"],
            {int(token): bias for token, bias in params.get("logit_bias", {}).items()},
        )
        return JSONResponse(self.answer(body, await self.run(body["rid"], toy)))

    def answer(self, body: dict[str, Any], done: ToyRequest) -> dict[str, Any]:
        ended: dict[str, Any] = {"type": done.reason}
        if done.reason == "stop":
            ended["matched"] = done.ids[-1]
        elif done.reason == "length":
            ended["length"] = len(done.ids)
        else:
            ended["message"] = "Aborted"
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": ended,
            "prompt_tokens": len(done.prompt),
            "completion_tokens": len(done.ids),
            "cached_tokens": 0,
            # Of the weights it holds when it answers, whatever sampled the tokens.
            "weight_version": self.label,
            "e2e_latency": 0.1,
            "output_token_logprobs": [
                [float(scores[token]), token, None]
                for token, scores in zip(done.ids, done.processed, strict=True)
            ],
        }
        most = body["top_logprobs_num"]
        if most:
            meta["output_top_logprobs"] = [top(scores, most) for scores in done.processed]
        if body["logprob_start_len"] == 0:
            scores = done.scores(self.model)
            meta["input_token_logprobs"] = [
                [None if at is None else float(at[token]), token, None]
                for token, at in zip(done.prompt, scores, strict=True)
            ]
            meta["input_top_logprobs"] = [None if at is None else top(at, most) for at in scores]
        return {"text": "", "output_ids": done.ids, "meta_info": meta}

    async def abort_request(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        # It ends everything whose id begins so.
        self.abort([key for key in self.requests if key.startswith(rid)])
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        mode = (await request.json())["mode"]
        assert mode in ("abort", "retract", "in_place")
        self.calls.append(f"pause {mode}")
        self.moving.clear()
        if mode == "abort":
            self.abort(list(self.requests))
        message = "Generation paused successfully."
        return JSONResponse({"message": message, "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        await request.json()
        self.calls.append("resume")
        self.moving.set()
        message = "Generation continued successfully."
        return JSONResponse({"message": message, "status": "ok"})

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append("reload")
        try:
            self.load(body["model_path"])
        except OSError as problem:
            content = {"success": False, "message": str(problem), "num_paused_requests": 0}
            return JSONResponse(content, 400)
        if body.get("weight_version") is not None:
            self.label = body["weight_version"]
            self.calls.append(f"label {self.label}")
        content = {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
        return JSONResponse(content)

    async def update_weight_version(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        message = f"Weight version updated to {self.label}"
        content = {"success": True, "message": message, "new_version": self.label}
        return JSONResponse(content)

    async def flush_cache(self, _: Request) -> Response:
        self.calls.append("reset")
        self.stale = False
        return PlainTextResponse("Cache flushed.\n")


def top(scores: np.ndarray, most: int) -> list[list[Any]]:
    return [[float(scores[i]), int(i), None] for i in np.argsort(-scores)[:most]]
