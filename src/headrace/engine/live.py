"""One request on its way through the engine: what it asked for and what it has sampled so far."""

from headrace.engine.types import EngineError, GenerationRequest
from headrace.rollout.types import Span


class Live:
    """One request between arrival and end.

    Args:
        request: checked.
        seed: of its draws.
        limit: most tokens to sample, >= 1.
        now: time of arrival, on the engine's clock.
    """

    __slots__ = (
        "arrived",
        "deadline",
        "ids",
        "limit",
        "logprobs",
        "marks",
        "request",
        "seed",
        "started",
        "stop_ids",
    )

    def __init__(self, request: GenerationRequest, *, seed: int, limit: int, now: float) -> None:
        self.request = request
        self.seed = seed
        self.limit = limit
        self.stop_ids = frozenset(request.sampling.stop_ids)
        self.arrived = now
        self.started: float | None = None
        self.deadline = now + request.timeout_s
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        # (index of the first token, version): where each span begins.
        self.marks: list[tuple[int, int]] = []

    def stamp(self, version: int) -> None:
        """Tokens from here on come from `version`."""
        if self.marks and self.marks[-1][0] == len(self.ids):
            self.marks.pop()
        self.marks.append((len(self.ids), version))

    def spans(self, engine_id: str) -> tuple[Span, ...]:
        """What was sampled, cut where the version changed."""
        # A request that never left the queue has no marks, hence one end too many.
        ends = [start for start, _ in self.marks[1:]] + [len(self.ids)]
        return tuple(
            Span(tuple(self.ids[start:end]), tuple(self.logprobs[start:end]), version, engine_id)
            for (start, version), end in zip(self.marks, ends, strict=False)
            if end > start
        )


def check(request: GenerationRequest, *, vocab: int, max_context: int) -> None:
    """Refuse what no engine of this vocabulary and context can run.

    Raises:
        EngineError: INVALID or TOO_LONG.
    """
    sampling = request.sampling
    problem = None
    if not request.prompt_ids:
        problem = "prompt_ids is empty"
    elif min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
        problem = f"prompt_ids holds an id outside the vocabulary of {vocab}"
    elif sampling.max_tokens < 1:
        problem = f"max_tokens is {sampling.max_tokens}; it must be >= 1"
    elif not 0 <= sampling.temperature <= 1e6:
        problem = f"temperature is {sampling.temperature}; it must be 0 (greedy) or positive"
    elif 0 < sampling.temperature < 1e-6:
        problem = f"temperature is {sampling.temperature}; use 0 for greedy"
    elif not 0 < sampling.top_p <= 1:
        problem = f"top_p is {sampling.top_p}; it must lie in (0, 1]"
    elif sampling.top_k < 0:
        problem = f"top_k is {sampling.top_k}; it must be >= 0 (0 keeps all)"
    elif not request.timeout_s > 0:
        problem = f"timeout_s is {request.timeout_s}; it must be positive"
    if problem is not None:
        raise EngineError(EngineError.INVALID, problem)
    if len(request.prompt_ids) >= max_context:
        raise EngineError(
            EngineError.TOO_LONG,
            f"prompt of {len(request.prompt_ids)} tokens leaves no room in the context of "
            f"{max_context}",
        )
