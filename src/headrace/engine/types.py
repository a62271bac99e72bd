"""What crosses the door of an engine: token ids in; token ids, logprobs and versions out.

Engines know nothing of text, chat templates, sessions' meaning or training.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.engine.config import UpdatePolicy
from headrace.rollout.types import FinishReason, Span

Alternatives = tuple[tuple[int, float], ...]
"""The likeliest ids at one position with their raw logprobs, likeliest first."""


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample. Every parameter at its default leaves the model's distribution alone.

    The logits z of one step pass through these in this order:

        1. z[i] += logit_bias[i]
        2. repetition_penalty r: z[i] becomes z[i] / r if positive, z[i] * r if negative, for every
           id of the prompt or output (Keskar et al., arXiv 1909.05858; as in transformers)
        3. z[i] -= frequency_penalty * c[i] + presence_penalty * (c[i] > 0), where c[i] counts id i
           in the output alone (as in the OpenAI API)
        4. before min_tokens ids were sampled: z[i] = -inf for every stop id; and for every id that
           the grammar does not allow next
        5. z /= temperature
        6. top_k, then top_p of what top_k left, then min_p of what both left
        7. softmax, and the draw. Temperature 0 takes the largest z after step 4 instead.

    Two logprobs of each sampled id are kept:

        `Span.logprobs` are of the distribution drawn from, after all seven steps (greedy: the
        softmax after step 4, at temperature 1). The trainer uses these. Its importance ratio is
        pi_theta / pi_rollout, and it computes log pi_theta from logits divided by the stage's
        temperature, the one the stage's rollouts were sampled with: both are softmax(z / T). At
        T != 1 the raw logprobs would compare two different policies even with equal weights.
        `GenerationResult.raw_logprobs` are of softmax(z), the model's own opinion, whatever was
        asked for: for teachers, evaluation, and comparing models. With temperature 1 and nothing
        else both are the same numbers.

    The trainer knows the temperature and nothing else. Steps 1 to 4 and 6 change the behaviour
    policy in ways it does not repeat: ratios are then off by what these steps moved or cut off,
    and the objective masks such tokens. Sample what is to be trained with a temperature alone.

    Attributes:
        max_tokens: most tokens to sample, >= 1.
        temperature: 0 means greedy.
        top_p: nucleus mass in (0, 1]: keep the fewest likeliest ids whose mass reaches it.
        top_k: keep the k likeliest ids; 0 keeps all.
        seed: makes the request's draws a function of this seed alone; None draws one.
        stop_ids: sampling ends after one of these, which is kept as the last output id. Ids past
            the model's vocabulary do no harm.
        stop: texts after which sampling ends, at most 16 of 1 to 256 bytes. The bytes of the
            sampled tokens are searched, not those of the prompt; the token that completes a text is
            kept as the last output id, with whatever else it spells. Not before min_tokens.
        min_p: in [0, 1]: keep ids at least this share as likely as the likeliest.
        repetition_penalty: in [0.01, 100]; 1 is off, above 1 discourages what was seen.
        presence_penalty: in [-2, 2]; once for every id sampled before.
        frequency_penalty: in [-2, 2]; for each time an id was sampled before.
        logit_bias: id -> number in [-100, 100] added to its logit; -100 all but bans an id.
        min_tokens: no stop id can be sampled before this many tokens were, and no stop text ends
            an output of fewer; <= max_tokens.
        logprobs: how many alternatives to report for each sampled token, 0 to 20.
        prompt_logprobs: None reports nothing of the prompt; k in 0 to 20 its tokens' raw logprobs
            and k alternatives each. All prompt positions are then computed, none reused.
        grammar: what the output has to spell, in llguidance's dialect of Lark, at most 64 KiB; ""
            leaves it free. Tokens that are no text are written by number, `<[7]>`. Stop ids are
            allowed where the grammar is satisfied; without any, sampling ends where nothing can
            follow. An output that is cut (max_tokens) spells the beginning of something allowed.
        grammar_after: the id behind which the grammar begins, e.g. the one that ends thinking;
            until then all but stop ids are allowed. None begins at once.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str = ""
    grammar_after: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        id: unique; reused to abort.
        prompt_ids: at least one token.
        sampling: see SamplingParams.
        timeout_s: seconds after arrival at which it ends with FinishReason.DEADLINE.
        session: requests of one session share what is fair for it; "" is a session of its own.
        priority: higher goes first.
        stream: tokens are told as they are sampled, see `Progress`. Clients set it themselves.
        resumed: so many of the last prompt ids are output that this very request sampled on another
            engine. Draws, penalties and min_tokens count on from there; max_tokens is of new ones.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float = 60.0
    session: str = ""
    priority: int = 0
    stream: bool = False
    resumed: int = 0


class Progress(msgspec.Struct, frozen=True):
    """What one request sampled since the last one of these, for those who want to watch.

    Concatenated from the last `restart` on, the tokens are those of the result, which is complete
    in itself.

    Attributes:
        id: of the request.
        ids: sampled ids, oldest first.
        logprobs: one each, as in `Span`.
        raw_logprobs: one each, as in `GenerationResult`; empty from engines without them.
        weight_version: of all of them.
        restart: forget what was told before: the request began again from its prompt, because of
            new weights or because its engine had to be replaced. `ids` may be empty then.
        alternatives: one each where asked for; empty from engines that tell them at the end only.
        stop: the text of `SamplingParams.stop` that the last id completed: nothing follows it.

    Raises:
        ValueError: parallel data of different lengths (law L5).
    """

    id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    weight_version: int
    restart: bool = False
    alternatives: tuple[Alternatives, ...] = ()
    stop: str | None = None

    def __post_init__(self) -> None:
        some = (0, len(self.ids))
        if len(self.logprobs) != len(self.ids) or len(self.raw_logprobs) not in some:
            raise ValueError(
                f"Progress: {len(self.ids)} ids but {len(self.logprobs)} logprobs and "
                f"{len(self.raw_logprobs)} raw_logprobs"
            )
        if len(self.alternatives) not in some:
            raise ValueError(
                f"Progress: {len(self.ids)} ids but {len(self.alternatives)} alternatives"
            )


OnProgress = Callable[[Progress], None]
"""Called in the event loop as tokens come; must not block."""


class GenerationResult(msgspec.Struct, frozen=True):
    """Everything sampled for one request; spans may be empty after an abort or deadline.

    Raises:
        ValueError: parallel data of different lengths (law L5).
    """

    id: str
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    queue_s: float = 0.0
    """Seconds from arrival to the first prefill."""
    total_s: float = 0.0
    """Seconds from arrival to the end."""
    raw_logprobs: tuple[float, ...] = ()
    """One per output token over all spans, of the model's own distribution; see SamplingParams.
    Empty from engines that do not report it."""
    alternatives: tuple[Alternatives, ...] = ()
    """One per output token where asked for, by raw logprob."""
    prompt_logprobs: tuple[float, ...] = ()
    """Raw; one per prompt token where asked for. The first is NaN: nothing predicts it."""
    prompt_alternatives: tuple[Alternatives, ...] = ()
    """One per prompt token where asked for; the first is empty."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were already there."""
    drafted_tokens: int = 0
    """Guesses of prediction layers that were verified on the way."""
    accepted_tokens: int = 0
    """Of them, those that became output."""
    preemptions: int = 0
    """How often the request gave up its memory to another and was computed again."""
    stop: str | None = None
    """The text of `SamplingParams.stop` that ended it."""

    def __post_init__(self) -> None:
        sampled = sum(len(span.ids) for span in self.spans)
        for name in ("raw_logprobs", "alternatives"):
            found = len(getattr(self, name))
            if found not in (0, sampled):
                raise ValueError(f"GenerationResult: {sampled} output ids but {found} {name}")
        if len(self.prompt_alternatives) not in (0, len(self.prompt_logprobs)):
            raise ValueError(
                f"GenerationResult: {len(self.prompt_logprobs)} prompt_logprobs but "
                f"{len(self.prompt_alternatives)} prompt_alternatives"
            )


class GenerationFailure(NamedTuple):
    """A request that ended without a result through no fault of its own."""

    id: str
    code: str
    message: str


Told = GenerationResult | GenerationFailure | Progress
"""What an engine says of a request: any number of the last, then one of the others."""


class EngineError(Exception):
    """A request an engine refuses. `code` is one of the constants below."""

    INVALID = "invalid_request"
    TOO_LONG = "context_length_exceeded"
    OVERLOADED = "overloaded"
    CLOSED = "engine_closed"
    FAILED = "generation_failed"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineClient(Protocol):
    """An engine as the rest of the system holds it: in its own process, in a thread, or a server
    of another make."""

    @property
    def weight_version(self) -> int:
        """Newest version all engines behind this client have loaded."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of prompt + output one request may have."""
        ...

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        """Run one request to its end. Cancelling this ends the request early.

        Args:
            request: its id must not be in use.
            on_progress: told the tokens as they are sampled, before this returns; engines that
                cannot do so tell all of them at once at the end. What it raises ends the request
                and is raised here.

        Raises:
            EngineError: refused (invalid, too long, overloaded, closed) or failed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early; its `generate` returns with FinishReason.ABORTED. Unknown: no-op."""
        ...

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        """Switch to other weights while requests run.

        Args:
            path: a checkpoint directory, or what else the engine documents.
            version: their stamp, >= 0.
            policy: what becomes of running requests.

        Raises:
            UserError: the weights cannot be read or do not fit; the old ones stay.
            EngineError: an invalid version or policy, or an engine that cannot do it.
        """
        ...

    async def stats(self) -> dict[str, Any]:
        """Counters and the present load, named as in `EngineStats` where they mean the same."""
        ...

    async def close(self) -> None:
        """Let go of the engine. Open requests fail with CLOSED. Safe to repeat."""
        ...


class PolicyEngine(EngineClient, Protocol):
    """What a run trains: an engine, or several as one, that takes its weights from a trainer."""

    async def load_weights(
        self,
        path: str,
        version: int,
        policy: UpdatePolicy = "continue",
        *,
        checkpoint: str | None = None,
    ) -> None:
        """See `ProcessEngine.load_weights`."""
        ...
