"""Groups that would be too old are not begun: the rule alone, and a source in simulated time."""

import asyncio
import math
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from stand_ins import ScriptedGate, ScriptedTask, mix_of

from headrace.rollout.choosing.admission import Admission
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import RolloutRunner
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import Outcome
from headrace.rollout.window import Hold, HoldTimer
from headrace.tasks.types import RolloutResult

GROUP, BATCH = 4, 4


def published(rule: Admission, groups: int, *, stale: bool = False, waited: bool = False) -> None:
    rule.left(groups)
    if stale:
        rule.stale()
    if waited:
        rule.waited()
    rule.published()


def test_nothing_is_held_back_before_anything_was_stale_or_the_rate_is_known() -> None:
    rule = Admission(4, 8)
    for _ in range(20):
        published(rule, 8)
    assert rule.bound is None
    assert not rule.full(10**6)
    rule.stale()
    assert rule.bound == pytest.approx((4 + 1) * 8)
    young = Admission(4, 8)
    published(young, 8, stale=True)
    assert young.bound is None, "one publication is no rate"
    never = Admission(None, 8)
    for _ in range(20):
        published(never, 8, stale=True)
    assert never.bound is None


def test_the_bound_follows_the_rate_and_what_is_stale() -> None:
    rule = Admission(4, 8)
    for _ in range(8):
        published(rule, 32, stale=True, waited=True)  # three of four groups carry no signal
    assert rule.bound == pytest.approx(5 * 32)
    assert (rule.full(160), rule.full(159)) == (True, False)
    bounds = []
    for _ in range(6):
        published(rule, 32, stale=True)
        bounds.append(rule.bound)
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx((0.5 * 4 + 1) * 32)
    published(rule, 32, stale=True, waited=True)
    assert rule.bound == pytest.approx((0.625 * 4 + 1) * 32), "a trainer that waits gets more"
    for _ in range(40):
        published(rule, 32)
    assert rule.bound == pytest.approx(5 * 32)


def test_one_batch_may_always_be_on_its_way() -> None:
    rule = Admission(0, 8)
    for _ in range(8):
        published(rule, 1, stale=True)  # batches of one group
    assert rule.bound == 8
    before = rule.bound
    rule.published()  # of a batch that a crashed process had cut
    assert rule.bound == before


def test_kept_back_rollouts_are_added_up_over_time() -> None:
    now = [0.0]
    timer = HoldTimer(lambda: now[0])
    for reason, slots, seconds in ((Hold.STALENESS, 6, 2.0), (Hold.READY, 0, 3.0)):
        timer.switch(reason, slots)
        now[0] += seconds
    assert timer.take_slot_s() == 12.0
    assert timer.take() == {Hold.STALENESS: 2.0, Hold.READY: 3.0}
    assert timer.take_slot_s() == 0.0


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = selectors.DefaultSelector()
        look = selector.select

        def select(timeout: float | None = None) -> Any:
            found = look(0)
            if not found:
                assert timeout is not None, "everybody waits for somebody"
                self.now += timeout
            return found

        selector.select = select  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def in_simulated_time(work: Coroutine[Any, Any, "Found"]) -> "Found":
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)


class VersionedGate(ScriptedGate):
    """Stamps a session with the version that it began with, its oldest one."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.began: dict[str, int] = {}

    def open_session(self, session_id, *, limits=None, seed=None) -> str:
        self.began[session_id] = self.version
        return super().open_session(session_id, limits=limits, seed=seed)

    async def close_session(self, session_id):
        newest, self.version = self.version, self.began.pop(session_id, self.version)
        try:
            return await super().close_session(session_id)
        finally:
            self.version = newest


class Found(msgspec.Struct):
    """What a simulated stage came to."""

    seconds: float
    """Between the first and the last update."""
    stale_by: list[int]
    """After each update, trajectories dropped as stale."""
    begun: int
    held_slot_s: float

    @property
    def stale(self) -> int:
        return self.stale_by[-1]

    def stale_at(self, update: int) -> int:
        return self.stale_by[update - 1]


async def stage(
    ledger: Ledger,
    *,
    concurrency: int,
    staleness: int,
    updates: int,
    hold_back: bool,
    sigma: float = 1.5,
    slots: int = 7,
) -> Found:
    """An engine of so many slots, log-normal tools and turns, a trainer that takes 1 s per update.

    Seven slots make a batch in about 0.9 s when all of them are taken.
    """
    rng = random.Random(0)
    engine = asyncio.Semaphore(slots)

    async def rollout(number, instance):
        turns = max(1, min(40, round(rng.lognormvariate(math.log(7.0), 0.5))))
        for turn in range(turns):
            async with engine:
                await asyncio.sleep(rng.uniform(0.025, 0.075))
            if turn + 1 < turns:
                await asyncio.sleep(rng.lognormvariate(math.log(0.1) - sigma**2 / 2, sigma))
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    task, gate = ScriptedTask(rollout), VersionedGate(ledger)
    runner = RolloutRunner(
        tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m", timeout_s=1e6
    )
    config = SourceConfig(
        "rl", GROUP, BATCH, concurrency, staleness, 1.0, 100, ready_batches=4, hold_back=hold_back
    )
    source = RolloutSource(config, runner=runner, ledger=ledger, mix=mix_of(task))
    clock = asyncio.get_running_loop().time
    source._hold = HoldTimer(clock)
    source.start()
    ends: list[float] = []
    stale: list[int] = []
    for version in range(1, updates + 1):
        batch = await source.cut(version, 1e6)
        assert batch is not None
        await asyncio.sleep(1.0)
        ledger.commit_batch("rl", batch.index, version)
        gate.version = version + 1
        source.published(version + 1)
        ends.append(clock())
        stale.append(source.window.dropped_stale)
    window = source.take_window()
    await source.stop()
    return Found(ends[-1] - ends[0], stale, source.cursor, window.held_slot_s)


@pytest.fixture
def simulate(tmp_path) -> Callable[..., Found]:
    count = iter(range(100))

    def run(**changes) -> Found:
        folder = tmp_path / str(next(count))
        folder.mkdir()
        with Ledger.create(folder) as ledger:
            return in_simulated_time(stage(ledger, **changes))

    return run


def test_far_more_rollouts_than_the_trainer_takes_are_not_thrown_away(simulate) -> None:
    settings = {"concurrency": 128, "staleness": 8, "updates": 45, "slots": 9}
    loose, held = (simulate(**settings, hold_back=hold_back) for hold_back in (False, True))
    # Those that were begun before the trainer's rate was known are lost either way.
    early, late = loose.stale_at(20), loose.stale - loose.stale_at(20)
    assert late > 160, "as many as train, or half"
    assert held.stale_at(20) <= early
    assert held.stale - held.stale_at(20) < late / 6
    assert held.begun < loose.begun
    assert held.held_slot_s > 0.0 == loose.held_slot_s
    assert held.seconds <= loose.seconds, "no slower"


def test_where_nothing_is_stale_nothing_changes(simulate) -> None:
    settings = {"concurrency": 24, "staleness": 8, "updates": 25, "sigma": 0.5}
    loose, held = (simulate(**settings, hold_back=hold_back) for hold_back in (False, True))
    assert loose.stale == 0
    assert held == loose
