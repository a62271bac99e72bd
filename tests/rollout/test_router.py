"""Requests outlive replicas, tokens are never mixed up, and faulty replicas come back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from headrace.engine.config import UpdatePolicy
from headrace.engine.types import (
    Alternatives,
    EngineError,
    GenerationRequest,
    GenerationResult,
    OnProgress,
    Progress,
    SamplingParams,
)
from headrace.errors import UserError
from headrace.rollout.replicas.health import Fault, HealthPolicy
from headrace.rollout.replicas.replica import Weights
from headrace.rollout.replicas.router import Router
from headrace.rollout.replicas.routing import RoutingTable
from headrace.rollout.types import FinishReason, Span

POLICY = HealthPolicy(
    beat_interval_s=0.01,
    beat_timeout_s=0.5,
    missed_beats=2,
    stuck_s=0.05,
    errors=3,
    start_timeout_s=5.0,
    backoff_s=0.01,
    backoff_most_s=0.04,
)


def token(position: int) -> int:
    """What every engine samples at a position: a stand-in for draws that depend on it alone."""
    return 1000 + position


class FakeEngine:
    """Samples `token(position)` one by one, and has every fault on demand."""

    max_context = 100

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.requests: list[GenerationRequest] = []
        self.loads: list[tuple[str, int, str]] = []
        self.refuses: EngineError | UserError | None = None
        self.dies_after: int | None = None
        self.tells_alternatives = True
        self.held = asyncio.Event()
        self.held.set()
        self.silent = False
        self.stuck = False
        self.reports: int | None = None
        self.closed = False
        self.sampled = 0
        self.running = 0
        self.entered = asyncio.Event()
        self.aborted: set[str] = set()

    @property
    def weight_version(self) -> int:
        return self.version

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> GenerationResult:
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(request)
        ids: list[int] = []
        self.running += 1
        self.entered.set()
        try:
            first = len(request.prompt_ids)
            while len(ids) < request.sampling.max_tokens:
                await self.held.wait()
                await asyncio.sleep(0)
                if self.closed or self.dies_after == len(ids):
                    raise EngineError(EngineError.CLOSED, f"{self.name} died")
                if request.id in self.aborted:
                    return self._result(request, ids, FinishReason.ABORTED)
                ids.append(token(first + len(ids)))
                self.sampled += 1
                ended = f"t{ids[-1]}" if f"t{ids[-1]}" in request.sampling.stop else None
                if on_progress is not None:
                    others = self._others(request, ids[-1:]) if self.tells_alternatives else ()
                    on_progress(
                        Progress(
                            request.id,
                            (ids[-1],),
                            (-1.0,),
                            (-2.0,),
                            self.version,
                            alternatives=others,
                            stop=ended,
                        )
                    )
                if ended is not None:
                    if self.dies_after == len(ids):
                        raise EngineError(EngineError.CLOSED, f"{self.name} died")
                    return self._result(request, ids, FinishReason.STOP, ended)
            return self._result(request, ids, FinishReason.LENGTH)
        finally:
            self.running -= 1

    def _result(
        self,
        request: GenerationRequest,
        ids: list[int],
        reason: FinishReason,
        stop: str | None = None,
    ) -> GenerationResult:
        n = len(ids)
        spans = (Span(tuple(ids), (-1.0,) * n, self.version, self.name),) if n else ()
        return GenerationResult(
            request.id,
            spans,
            reason,
            raw_logprobs=(-2.0,) * n,
            alternatives=self._others(request, ids),
            stop=stop,
        )

    @staticmethod
    def _others(request: GenerationRequest, ids: list[int]) -> tuple[Alternatives, ...]:
        return tuple(((i, -2.0),) for i in ids) if request.sampling.logprobs else ()

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    async def load_weights(
        self, path: str, version: int, policy: UpdatePolicy = "continue"
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.loads.append((path, version, policy))
        self.version = version

    async def stats(self) -> dict[str, Any]:
        if self.closed:
            raise EngineError(EngineError.CLOSED, "closed")
        if self.silent:
            await asyncio.Event().wait()
        return {
            "tokens_sampled": 0 if self.stuck else self.sampled,
            "tokens_prefilled": 0,
            "running": 1 if self.stuck else 0,
            "version": self.version if self.reports is None else self.reports,
        }

    async def close(self) -> None:
        self.closed = True


class Pool:
    """A router over fake engines; `engines` are the present lives, by name."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.engines: dict[str, FakeEngine] = {}
        self.started: list[tuple[str, str, int]] = []
        self.failing_starts = 0
        self.came: asyncio.Queue[str] = asyncio.Queue()

    def add(self, *names: str) -> None:
        for name in names:
            self.router.add(name, self._starter(name))

    def _starter(self, name: str) -> Callable[[str, int], Any]:
        async def start(checkpoint: str, version: int) -> FakeEngine:
            self.started.append((name, checkpoint, version))
            if self.failing_starts:
                self.failing_starts -= 1
                raise UserError("no such checkpoint")
            self.engines[name] = FakeEngine(name, version)
            self.came.put_nowait(name)
            return self.engines[name]

        return start

    async def home(self, session: str) -> FakeEngine:
        """The engine that serves a session."""
        await self.router.generate(request("probe", session=session, tokens=1))
        return next(e for e in self.engines.values() if e.requests and e.requests[-1].id == "probe")


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = Pool(Router(Weights("first", 0), policy=POLICY, table=RoutingTable(busy_margin=50)))
    yield made
    await made.router.close()


def request(
    name: str, *, session: str = "s", tokens: int = 6, timeout_s: float = 20.0, **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(max_tokens=tokens, **sampling)
    return GenerationRequest(name, (1, 2, 3), params, timeout_s=timeout_s, session=session)


def ids(result: GenerationResult) -> list[int]:
    return [i for span in result.spans for i in span.ids]


WHOLE = [token(3 + i) for i in range(6)]


async def test_turns_of_a_session_go_to_one_replica(pool: Pool) -> None:
    pool.add("a", "b", "c")
    await pool.router.ready(3)
    home = await pool.home("s")
    for turn in range(4):
        result = await pool.router.generate(request(f"r{turn}"))
        assert ids(result) == WHOLE
        assert result.spans[0].engine_id == home.name
    assert len(home.requests) == 5
    assert (await pool.router.stats())["tokens_sampled"] == 25


async def test_a_dead_replica_costs_no_token(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.dies_after = 4
    told: list[Progress] = []
    result = await pool.router.generate(request("r"), told.append)
    assert ids(result) == WHOLE
    other = "b" if home.name == "a" else "a"
    assert [(span.engine_id, len(span.ids)) for span in result.spans] == [
        (home.name, 4),
        (other, 2),
    ]
    assert len(result.raw_logprobs) == 6
    assert [i for progress in told for i in progress.ids] == WHOLE
    assert not any(progress.restart for progress in told)
    went_on = pool.engines[other].requests[-1]
    assert went_on.resumed == 4
    assert went_on.prompt_ids == (1, 2, 3, *WHOLE[:4])
    assert went_on.sampling.seed == home.requests[-1].sampling.seed is not None
    assert pool.router.counters["resumed_tokens"] == 4
    assert pool.router.counters[f"fault.{Fault.DIED}"] == 1


async def test_alternatives_and_stop_texts_outlive_a_replica(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.dies_after = 4
    result = await pool.router.generate(request("r", logprobs=1, stop=(f"t{WHOLE[4]}",)))
    assert ids(result) == WHOLE[:5]
    assert result.alternatives == tuple(((i, -2.0),) for i in WHOLE[:5])
    assert (result.finish_reason, result.stop) == (FinishReason.STOP, f"t{WHOLE[4]}")
    assert [len(span.ids) for span in result.spans] == [4, 1]
    assert pool.router.counters["resumed_tokens"] == 4


@pytest.mark.parametrize("tokens", [6, 4])
async def test_a_stop_text_that_was_told_ends_the_request_without_another_replica(
    pool: Pool, tokens: int
) -> None:
    """Also where it is the last token that may be sampled."""
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.dies_after = 4
    stop = f"t{WHOLE[3]}"
    result = await pool.router.generate(request("r", tokens=tokens, stop=(stop,)))
    assert ids(result) == WHOLE[:4]
    assert (result.finish_reason, result.stop) == (FinishReason.STOP, stop)
    other = pool.engines["b" if home.name == "a" else "a"]
    assert not any(asked.id == "r" for asked in other.requests)


async def test_what_cannot_be_resumed_exactly_is_dropped_and_counted(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.dies_after, home.tells_alternatives = 4, False
    told: list[Progress] = []
    result = await pool.router.generate(request("r", logprobs=1), told.append)
    assert ids(result) == WHOLE
    assert len(result.spans) == 1
    assert len(result.alternatives) == 6
    assert pool.router.counters["dropped_tokens.alternatives_lost"] == 4
    restarts = [i for i, progress in enumerate(told) if progress.restart]
    assert len(restarts) == 1
    assert [i for progress in told[restarts[0] :] for i in progress.ids] == WHOLE


async def test_versions_of_one_output_never_go_back(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.version, home.dies_after = 7, 3
    result = await pool.router.generate(request("r"))
    assert [span.weight_version for span in result.spans] == [0]
    assert pool.router.counters["dropped_tokens.older_weights"] == 3


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (lambda engine: setattr(engine, "silent", True), Fault.BEATS),
        (lambda engine: setattr(engine, "stuck", True), Fault.STUCK),
        (lambda engine: setattr(engine, "reports", 99), Fault.VERSION),
        (lambda engine: setattr(engine, "closed", True), Fault.DIED),
    ],
)
async def test_every_fault_is_seen_and_mended_while_a_request_is_in_flight(
    pool: Pool, break_it: Callable[[FakeEngine], None], fault: Fault
) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.held.clear()  # Nothing comes from it any more, and no error either.
    task = asyncio.create_task(pool.router.generate(request("r")))
    break_it(home)
    assert ids(await task) == WHOLE
    assert home.closed
    assert pool.router.counters[f"fault.{fault}"] == 1
    await pool.router.ready(2)
    replica = next(r for r in pool.router.replicas() if r["name"] == home.name)
    assert (replica["restarts"], replica["last_fault"]) == (1, fault)
    assert pool.engines[home.name] is not home


async def test_a_burst_of_errors_takes_a_replica_out(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.refuses = EngineError(EngineError.FAILED, "logits are not finite")
    for session in range(20):
        result = await pool.router.generate(request("r", session=f"s{session}"))
        assert ids(result) == WHOLE
        assert result.spans[0].engine_id != home.name or home.closed
    assert pool.router.counters["retried"] == 3
    await pool.router.ready(2)
    assert pool.router.counters[f"fault.{Fault.ERRORS}"] == 1
    assert home.closed


async def test_a_request_that_fails_everywhere_fails(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    for engine in pool.engines.values():
        engine.refuses = EngineError(EngineError.FAILED, "logits are not finite")
    pool.failing_starts = 1000
    with pytest.raises(EngineError, match="tried 6 times; the last one: logits are not finite"):
        await pool.router.generate(request("r"))


async def test_refusals_pass_through_and_overload_goes_elsewhere(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.refuses = EngineError(EngineError.OVERLOADED, "full")
    assert ids(await pool.router.generate(request("r"))) == WHOLE
    for engine in pool.engines.values():
        engine.refuses = EngineError(EngineError.OVERLOADED, "full")
    with pytest.raises(EngineError) as caught:
        await pool.router.generate(request("r"))
    assert caught.value.code == EngineError.OVERLOADED
    for engine in pool.engines.values():
        engine.refuses = EngineError(EngineError.TOO_LONG, "long")
    with pytest.raises(EngineError) as caught:
        await pool.router.generate(request("r"))
    assert caught.value.code == EngineError.TOO_LONG
    assert not pool.router.counters["retried"]


async def test_requests_wait_for_a_replica_and_no_longer_than_they_may(pool: Pool) -> None:
    waiting = asyncio.create_task(pool.router.generate(request("r")))
    late = await pool.router.generate(request("late", timeout_s=0.05))
    assert (late.finish_reason, late.spans) == (FinishReason.DEADLINE, ())
    pool.failing_starts = 2
    pool.add("a")
    assert ids(await waiting) == WHOLE
    assert pool.router.counters[f"fault.{Fault.START}"] == 2
    with pytest.raises(EngineError, match="1 of 3 replicas serve after"):
        await pool.router.ready(3, timeout_s=0.05)


async def test_weights_reach_all_and_those_that_cannot_are_started_again(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    first = dict(pool.engines)
    first["b"].refuses = UserError("disk full")
    await pool.router.load_weights("shared", 5, "requeue", checkpoint="folder")
    assert pool.router.weight_version == 5
    assert first["a"].loads == [("shared", 5, "requeue")]
    assert [await pool.came.get() for _ in range(3)][2] == "b"
    await pool.router.ready(2)
    assert pool.started[-1] == ("b", "folder", 5)
    assert pool.engines["b"].version == 5
    for engine in pool.engines.values():
        engine.refuses = UserError("no such file")
    with pytest.raises(UserError, match="no such file"):
        await pool.router.load_weights("gone", 6)
    assert pool.router.weight_version == 5


async def test_abort_reaches_the_replica_and_holds_across_its_death(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    home.held.clear()
    home.entered.clear()
    task = asyncio.create_task(pool.router.generate(request("r")))
    await home.entered.wait()
    await pool.router.abort("r")
    assert home.aborted == {"r"}
    home.closed = True
    home.held.set()
    result = await task
    assert result.finish_reason is FinishReason.ABORTED
    await pool.router.abort("unknown")


async def test_replicas_join_drain_and_leave_under_load(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)

    async def talk(session: int) -> None:
        for turn in range(6):
            name = f"{session}/{turn}"
            result = await pool.router.generate(request(name, session=f"s{session}"))
            assert ids(result) == WHOLE

    async with asyncio.TaskGroup() as group:
        for session in range(12):
            group.create_task(talk(session))
        pool.add("c")
        await pool.router.ready(3)
        await pool.router.remove("a", grace_s=5.0)
    assert [r["name"] for r in pool.router.replicas()] == ["b", "c"]
    assert pool.engines["a"].closed
    assert not pool.router.counters["retried"], "a drained replica finishes what it has"
    with pytest.raises(ValueError, match="exists already"):
        pool.add("b")


async def test_closing_ends_everything(pool: Pool) -> None:
    pool.add("a")
    await pool.router.ready(1)
    pool.engines["a"].held.clear()
    task = asyncio.create_task(pool.router.generate(request("r")))
    await pool.engines["a"].entered.wait()
    await pool.router.close()
    await pool.router.close()
    with pytest.raises(EngineError) as caught:
        await task
    assert caught.value.code in (EngineError.CLOSED, EngineError.FAILED)
    assert pool.engines["a"].closed


async def test_numbers_that_only_rise_do_so_over_lives(pool: Pool) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    home = await pool.home("s")
    before = (await pool.router.stats())["tokens_sampled"]
    assert before == 1
    home.dies_after = 4
    await pool.router.generate(request("r"))
    await pool.router.ready(2)
    stats = await pool.router.stats()
    # The engine that died was last heard of before its last four tokens, at the earliest.
    assert before + 2 <= stats["tokens_sampled"] <= before + 6
    assert stats["serving"] == 2
    assert stats["busy_s"] == 0, "there even if no engine says so"
    pool.engines[home.name].silent = True
    assert (await pool.router.stats())["tokens_sampled"] >= stats["tokens_sampled"]


async def test_weights_that_all_replicas_died_over_are_what_they_start_again_with(
    pool: Pool,
) -> None:
    pool.add("a", "b")
    await pool.router.ready(2)
    for _ in range(2):
        pool.came.get_nowait()
    for engine in pool.engines.values():
        engine.refuses = EngineError(EngineError.CLOSED, "died")
    await pool.router.load_weights("shared", 7, checkpoint="disk")
    for _ in range(2):
        await asyncio.wait_for(pool.came.get(), 5)
    assert [started[1:] for started in pool.started[2:]] == [("disk", 7), ("disk", 7)]
    assert pool.router.weight_version == 7


async def test_a_mistake_is_said_at_once_and_people_are_told_of_faults() -> None:
    words: list[str] = []
    router = Router(Weights("first", 0), policy=POLICY, report=words.append)
    made = Pool(router)
    made.failing_starts = 1
    made.add("a")
    try:
        with pytest.raises(UserError, match="no such checkpoint"):
            await router.ready(1)
        assert ids(await router.generate(request("r"))) == WHOLE
        assert words[0].startswith("a did not start; starts again in ")
        assert words[-1] == "a serves again, version 0"
    finally:
        await router.close()
