"""Several samples of one prompt: requests of their own, which share what the prompt computes.

The engine needs no notion of this. Its prefix tree holds the prompt once, and a request waits for
a neighbour that is computing the same tokens.
"""

import asyncio
import secrets

import msgspec

from headrace.engine.sampling.seeds import derive_seed
from headrace.engine.types import (
    EngineClient,
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
)

MAX_SAMPLES = 128
"""Most samples of one request."""


def expand(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """The n requests that one request for n samples stands for.

    Sample k has the id "<id>/<k>" and the seed `derive_seed(seed, k)`, so the first samples stay
    the same however many are asked for. All belong to one session. Logprobs of the prompt, which
    all share, are asked of the first alone.

    Args:
        request: if it has no seed, it gets a random one here.
        n: 1 to 128.

    Raises:
        EngineError: INVALID n.
    """
    if not 1 <= n <= MAX_SAMPLES:
        raise EngineError(EngineError.INVALID, f"n is {n}; it must lie in 1 to {MAX_SAMPLES}")
    sampling = request.sampling
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return [
        msgspec.structs.replace(
            request,
            id=f"{request.id}/{k}",
            session=request.session or request.id,
            sampling=msgspec.structs.replace(
                sampling,
                seed=derive_seed(seed, k),
                prompt_logprobs=None if k else sampling.prompt_logprobs,
            ),
        )
        for k in range(n)
    ]


async def generate_several(
    engine: EngineClient,
    request: GenerationRequest,
    n: int,
    on_progress: OnProgress | None = None,
) -> list[GenerationResult]:
    """Run all samples of a request: all of them end, or one's error ends the others.

    Args:
        engine: what generates.
        request: see `expand`.
        n: how many samples.
        on_progress: told the tokens of every sample, by the samples' ids.

    Returns:
        One result per sample, in order.

    Raises:
        EngineError: INVALID n, or the first error of any sample.
    """
    requests = expand(request, n)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(engine.generate(one, on_progress), name=one.id)
                for one in requests
            ]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
