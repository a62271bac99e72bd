"""The rollout source and runner against scripted task services and the real ledger."""

import asyncio
import itertools

import msgspec
import pytest

from headrace.errors import UserError
from headrace.rollout.curriculum import (
    Curriculum,
    CurriculumConfig,
    choices_key,
    difficulty_key,
)
from headrace.rollout.evaluation import evaluate
from headrace.rollout.ledger import Ledger
from headrace.rollout.mixing import HeldOut, TaskMix, TaskShare
from headrace.rollout.orchestrator import RolloutSource
from headrace.rollout.overgeneration import OvergenerationConfig
from headrace.rollout.pausing import FAILURES_IN_A_ROW, TaskPauses
from headrace.rollout.ratios import AdaptiveRatios, RatioRule, TaskBounds
from headrace.rollout.runner import RolloutRunner, Ticket
from headrace.rollout.sharing import cursor_key, ratios_key
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import Call, DropReason, FinishReason, Outcome, ParseState, Span
from headrace.stages.task_metrics import ratio_errors
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance

TIMEOUT = 20.0


class ScriptedGate:
    """Records one call of two tokens per session, stamped with the current version."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.version = 1
        self.open: set[str] = set()

    def open_session(self, session_id, *, limits=None, seed=None) -> str:
        self.open.add(session_id)
        return session_id

    def exceeded(self, session_id) -> str | None:
        return None

    def refused(self, session_id) -> str | None:
        return None

    async def close_session(self, session_id) -> tuple[Call, ...]:
        if session_id not in self.open:
            return ()
        self.open.discard(session_id)
        call = Call(
            id=f"{session_id}/0",
            session_id=session_id,
            index=0,
            parent_id=None,
            fork_reason=None,
            idempotency_key=None,
            messages=[{"role": "user", "content": "hi"}],
            tools=[],
            renderer_id="toy",
            prompt_delta=(1, 2, 3),
            spans=(Span((4, 5), (-0.5, -0.25), self.version, "e"),),
            finish_reason=FinishReason.STOP,
            parse_state=ParseState.OK,
            response={"role": "assistant", "content": "x"},
            started_at=0.0,
            finished_at=0.0,
        )
        self.ledger.record_call(call)
        return (call,)


class ScriptedTask:
    """Rewards alternate 0, 1 within a group unless `script` says otherwise."""

    name = "toy"

    def __init__(self, script=None) -> None:
        self.counter = itertools.count()
        self.script = script
        self.running = 0
        self.most_running = 0

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance("toy", seed, f"family{seed % 2}", 1, 2 + seed % 2)

    def train_seed(self, index: int) -> int:
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        return str(instance.seed)

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            number = next(self.counter)
            if self.script is not None:
                return await self.script(number, instance)
            await asyncio.sleep(0)
            return RolloutResult(Outcome.OK, {"reward": float(number % 2)})
        finally:
            self.running -= 1


class OnlySeed(ScriptedTask):
    """Every seed but one asks the same, which nobody measures."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def content_id(self, instance: TaskInstance) -> str:
        return f"special {instance.task}" if instance.seed == self.seed else "ordinary"


@pytest.fixture
def ledger(tmp_path):
    with Ledger.create(tmp_path) as opened:
        yield opened


def mix_of(task, **changes) -> TaskMix:
    share = TaskShare("toy", 1.0, lambda i: task.instance(task.train_seed(i)))
    return TaskMix([share], **changes)


def build(ledger, task, **changes):
    gate = ScriptedGate(ledger)
    runner = RolloutRunner(
        tasks={"toy": task}, gate=gate, ledger=ledger, base_url="http://x", model="m"
    )
    values = {
        "stage": "rl",
        "group_size": 4,
        "groups_per_batch": 2,
        "concurrency": 8,
        "staleness": 1,
        "temperature": 1.0,
        "max_tokens": 100,
    }
    report = changes.pop("report", lambda _: None)
    mix = changes.pop("mix", None) or mix_of(task)
    config = SourceConfig(**{**values, **changes})
    source = RolloutSource(config, runner=runner, ledger=ledger, mix=mix, report=report)
    return gate, source


async def settle(source: RolloutSource) -> None:
    """Until the ready queue is full and nothing is in flight."""
    async with asyncio.timeout(TIMEOUT):
        await asyncio.sleep(0)
        while source._rollouts:
            await asyncio.wait(list(source._rollouts))
            await asyncio.sleep(0)


async def test_batches_hold_whole_groups_with_zero_sum_advantages(ledger):
    task = ScriptedTask()
    _, source = build(ledger, task)
    source.start()
    for index in range(3):
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        assert batch.index == index
        assert len(batch.members) == 8
        assert sum(m.advantage * m.multiplicity for m in batch.members) == pytest.approx(0)
        for member in batch.members:
            (segment,) = member.segments
            assert segment.ids == (1, 2, 3, 4, 5)
            assert segment.train_mask == (False, False, False, True, True)
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()
    assert task.most_running <= 8
    assert ledger.conservation("rl").closes


async def test_the_ready_queue_is_bounded_while_nobody_trains(ledger):
    task = ScriptedTask()
    _, source = build(ledger, task)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    await settle(source)
    assert source.ready_groups >= 4
    dispatched = source.cursor
    for _ in range(50):
        await asyncio.sleep(0)
    assert source.cursor == dispatched
    assert source.ready_groups <= 4 + 4  # those in flight when it was full come on top
    await source.stop()


async def test_rollouts_give_way_little_by_little_while_groups_pile_up(ledger):
    """All or nothing would let a trainer run dry, then flood it with rollouts of one age."""
    task = ScriptedTask()
    _, source = build(ledger, task, concurrency=16, ready_batches=4)  # eight groups
    source.start()
    seen = set()
    async with asyncio.timeout(TIMEOUT):
        while source.ready_groups < 7:
            seen.add((source.ready_groups, source.in_flight))
            await asyncio.sleep(0)
    assert max(flying for ready, flying in seen if ready <= 2) > 8
    assert max(flying for ready, flying in seen if ready >= 6) <= 8
    await source.stop()


async def test_the_oldest_weights_are_cut_first(ledger):
    """A group that came late because it is slow would be stale before younger ones are used up."""
    gate: ScriptedGate

    async def script(number, instance):
        gate.version = 4 if number // 4 == 2 else 5  # one group at a time, four rollouts each
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    gate, source = build(ledger, ScriptedTask(script), concurrency=4)
    source.start()
    await settle(source)
    assert source.ready_groups >= 3
    batch = await source.cut(5, TIMEOUT)
    assert batch is not None
    assert {m.group_id for m in batch.members} == {"rl-000000", "rl-000002"}
    await source.stop()


async def test_stale_trajectories_are_dropped_when_the_batch_is_cut(ledger):
    gate, source = build(ledger, ScriptedTask())
    source.start()
    await settle(source)
    assert source.ready_groups >= 2
    gate.version = 3
    batch = await source.cut(3, TIMEOUT)
    assert batch is not None
    versions = {v for m in batch.members for s in m.segments for v in s.versions if v >= 0}
    assert min(versions) >= 2
    await source.stop()
    assert ledger.drop_counts("rl")[DropReason.STALE] >= 8


async def test_environment_failures_leave_the_baseline_alone_and_are_padded(ledger):
    async def script(number, instance):
        if number % 4 == 0:
            raise RuntimeError("boom")
        return RolloutResult(Outcome.OK, {"reward": float(number % 4 == 1)})

    _, source = build(ledger, ScriptedTask(script), groups_per_batch=1)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    assert len(batch.members) == 3
    assert sum(m.multiplicity for m in batch.members) == 4
    assert max(m.advantage for m in batch.members) == pytest.approx(2 / 3)
    await source.stop()
    assert source.take_window().env_failed >= 1
    failed = [s for s in ledger.sessions(stage="rl") if s.outcome is Outcome.ENV_FAILED]
    assert failed[0].reason == "RuntimeError: boom"


async def test_groups_without_signal_are_dropped_and_counted(ledger):
    async def script(number, instance):
        return RolloutResult(Outcome.OK, {"reward": 1.0 if number < 8 else float(number % 2)})

    _, source = build(ledger, ScriptedTask(script))
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    await source.stop()
    assert ledger.drop_counts("rl")[DropReason.NO_SIGNAL] == 8


async def test_an_environment_that_always_fails_ends_the_stage_with_its_reason(ledger):
    async def script(number, instance):
        raise OSError("no sandbox")

    _, source = build(ledger, ScriptedTask(script))
    source.pauses = TaskPauses(["toy"], first_pause_s=0.01, give_up_s=0.05)
    source.start()
    with pytest.raises(UserError, match=r"has worked for 0.05 s.* OSError: no sandbox"):
        await source.cut(1, TIMEOUT)
    await source.stop()
    assert source.take_window().env_failed >= FAILURES_IN_A_ROW


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (RolloutResult(Outcome.OK, {"reward": float("nan")}), "rewards.reward is nan"),
        (RolloutResult(Outcome.OK, {"reward": 1.01}), "rewards.reward is 1.01"),
        (RolloutResult(Outcome.OK, {"reward": 1, "x": float("inf")}), "rewards.x is inf"),
        (RolloutResult(Outcome.AGENT_FAILED), "rewards.reward is missing"),
        (RolloutResult(Outcome.CANCELLED), "outcome is cancelled"),
        (RolloutResult(Outcome.ENV_FAILED, detail={"a": object()}), "JSON cannot hold"),
        (None, "result is None"),
    ],
)
async def test_a_result_that_cannot_be_is_an_environment_failure(ledger, result, says):
    async def script(number, instance):
        return result

    task = ScriptedTask(script)
    gate, _ = build(ledger, task)
    runner = RolloutRunner(tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m")
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    finished = await runner.run(Ticket("s", "g", "rl", "train", task.instance(2), 1.0))
    assert finished.session.outcome is Outcome.ENV_FAILED
    assert says in finished.session.reason
    assert finished.reward is None


async def test_a_hanging_task_service_is_cut_off(ledger, monkeypatch):
    monkeypatch.setattr("headrace.rollout.runner.GRACE_S", 0.01)

    async def script(number, instance):
        await asyncio.Event().wait()

    task = ScriptedTask(script)
    gate = ScriptedGate(ledger)
    runner = RolloutRunner(
        tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m", timeout_s=0.01
    )
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    finished = await runner.run(Ticket("s", "g", "rl", "train", task.instance(2), 1.0))
    assert finished.session.outcome is Outcome.ENV_FAILED
    assert "hung" in finished.session.reason
    assert not gate.open


async def test_sync_mode_dispatches_one_batch_at_a_time(ledger):
    task = ScriptedTask()
    _, source = build(ledger, task, mode="sync")
    source.start()
    for index in range(2):
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        assert len(batch.members) == 8
        assert source.in_flight == 0
        assert source.cursor == 2 * (index + 1)
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()


async def test_cut_gives_up_at_its_deadline(ledger):
    async def script(number, instance):
        await asyncio.Event().wait()

    _, source = build(ledger, ScriptedTask(script))
    source.start()
    assert await source.cut(1, 0.02) is None
    await source.stop()
    assert ledger.outcome_counts("rl") == {"open": 8}
    ledger.stage_started("rl")
    ledger.stage_finished("rl", 1.0)
    assert ledger.outcome_counts("rl") == {Outcome.CANCELLED: 8}


async def test_resume_replays_cut_batches_and_completes_groups(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        _, source = build(ledger, ScriptedTask())
        source.start()
        first = await source.cut(1, TIMEOUT)
        second = await source.cut(1, TIMEOUT)
        assert first is not None
        assert second is not None
        ledger.commit_batch("rl", 0, 1)
        ledger.checkpointed("rl", 1, "ck1")
        # A crash: nothing is told to stop; batch 1 was cut but never trained.
        for task in list(source._rollouts):
            task.cancel()
        await asyncio.gather(*source._rollouts, return_exceptions=True)
        await source.stop()
        finished = {s.id for s in ledger.sessions(stage="rl") if s.outcome is Outcome.OK} - {
            m.session_id for m in first.members
        }
    with Ledger.resume(tmp_path) as ledger:
        recovery = ledger.recover("rl")
        assert recovery.step == 1
        task = ScriptedTask()
        gate = ScriptedGate(ledger)
        runner = RolloutRunner(
            tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m"
        )
        source = RolloutSource(
            SourceConfig("rl", 4, 2, 8, 1, 1.0, 100),
            runner=runner,
            ledger=ledger,
            mix=mix_of(task, state=1000),
        )
        source.resume(recovery)
        assert source.replaying
        source.start()
        replayed = await source.cut(1, TIMEOUT)
        assert replayed is not None
        assert replayed == second
        assert not source.replaying
        ledger.commit_batch("rl", 1, 2)
        trained = {m.session_id for m in replayed.members}
        for index in range(2, 6):
            batch = await source.cut(1, TIMEOUT)
            assert batch is not None
            ids = {m.session_id for m in batch.members}
            assert not ids & trained
            trained |= ids
            ledger.commit_batch("rl", index, index + 1)
        await source.stop()
        assert finished <= trained
        assert ledger.conservation("rl").closes


async def test_several_tasks_share_a_stage_and_are_counted_apart(ledger):
    """Groups alternate 3 to 1, whatever order their rollouts end in; counts add up."""
    tasks = {"toy": ScriptedTask(), "other": ScriptedTask()}
    tasks["other"].instance = lambda seed: TaskInstance("other", seed, "f", 1, 1)
    runner = RolloutRunner(
        tasks=tasks, gate=ScriptedGate(ledger), ledger=ledger, base_url="", model="m"
    )
    mix = TaskMix(
        [
            TaskShare("toy", 3.0, lambda i: tasks["toy"].instance(2 * i)),
            TaskShare("other", 1.0, lambda i: tasks["other"].instance(2 * i)),
        ],
        # Seed 4 is measured, of one of the tasks.
        held_out=HeldOut({"toy": OnlySeed(4), "other": OnlySeed(-1)}, [tasks["toy"].instance(4)]),
    )
    config = SourceConfig("rl", 4, 2, 8, 1, 1.0, 100)
    source = RolloutSource(config, runner=runner, ledger=ledger, mix=mix)
    source.start()
    for index in range(8):
        assert await source.cut(1, TIMEOUT) is not None
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()
    sessions = list(ledger.sessions(stage="rl"))
    order = list(dict.fromkeys((s.group_id, s.task) for s in sessions))
    assert [task for _, task in sorted(order)][:8] == [
        "toy", "toy", "other", "toy", "toy", "toy", "other", "toy",
    ]  # fmt: skip
    assert 4 not in {s.instance["seed"] for s in sessions if s.task == "toy"}
    assert 4 in {s.instance["seed"] for s in sessions if s.task == "other"}
    counts = source.take_window().tasks
    assert sum(c.trained for c in counts.values()) == 16
    for name, found in counts.items():
        ended = [s for s in sessions if s.task == name and s.outcome is Outcome.OK]
        assert found.finished == found.scored == len(ended)
        assert found.reward_sum == sum(s.rewards["reward"] for s in ended)
        assert found.dispatched == len({s.group_id for s in sessions if s.task == name})
    saved = ledger.get_state(cursor_key("rl"))
    assert saved["toy"][0] == saved["toy"][1] + 1  # the one that was skipped
    assert saved["other"][0] == saved["other"][1]


def named(name: str, script=None) -> ScriptedTask:
    """A task of its own name."""
    task = ScriptedTask(script)
    task.name = name
    task.instance = lambda seed: TaskInstance(name, seed, "f", 1, 1)
    return task


def source_of(ledger, tasks, shares, *, ratios=None, **changes) -> RolloutSource:
    """A source of several tasks, by name; `shares` are of ratio and limit."""
    runner = RolloutRunner(
        tasks=tasks, gate=ScriptedGate(ledger), ledger=ledger, base_url="", model="m"
    )
    mix = TaskMix(
        [TaskShare(n, r, tasks[n].instance, limit) for n, (r, limit) in shares.items()],
        state=ledger.get_state(cursor_key("rl")),
    )
    config = SourceConfig("rl", 4, 2, changes.pop("concurrency", 32), 9, 1.0, 100, **changes)
    return RolloutSource(config, runner=runner, ledger=ledger, mix=mix, ratios=ratios)


async def test_a_slow_task_takes_no_more_than_its_limit_and_others_take_the_room(ledger):
    gate = asyncio.Event()

    async def wait(number, instance):
        await gate.wait()
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    tasks = {"slow": named("slow", wait), "fast": named("fast")}
    source = source_of(ledger, tasks, {"slow": (1.0, 8), "fast": (1.0, None)})
    source.start()
    for index in range(6):  # of fast groups alone, as no other ends
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        assert batch.tasks == {"fast": 2}
        assert source.sharing.running["slow"] == tasks["slow"].most_running == 8
        ledger.commit_batch("rl", index, index + 1)
    mix = source.sharing.mix
    assert ratio_errors(mix)["ratio_error"] > 0.2
    assert ratio_errors(mix)["trained_ratio_error"] == 0.5
    gate.set()
    for index in range(6, 40):
        assert await source.cut(1, TIMEOUT) is not None
        ledger.commit_batch("rl", index, index + 1)
    assert ratio_errors(mix)["ratio_error"] < 0.05
    assert tasks["slow"].most_running == 8
    await source.stop()
    assert source.sharing.running.total() == 0


async def test_a_synchronous_batch_waits_for_a_full_task_instead_of_giving_its_place_away(ledger):
    tasks = {"slow": named("slow"), "fast": named("fast")}
    shares = {"slow": (1.0, 4), "fast": (1.0, None)}
    source = source_of(ledger, tasks, shares, mode="sync")
    source.config = msgspec.structs.replace(source.config, groups_per_batch=6)
    source.start()
    batch = await source.cut(1, TIMEOUT)
    assert batch is not None
    assert batch.tasks == {"slow": 3, "fast": 3}
    assert tasks["slow"].most_running == 4
    await source.stop()


async def test_a_rule_moves_the_mix_and_a_resume_goes_on_with_it(tmp_path):
    async def hopeless(number, instance):
        return RolloutResult(Outcome.OK, {"reward": 0.0})

    def ratios(state=None):
        bounds = {n: TaskBounds(0.5, 0.1) for n in ("right", "hopeless")}
        return AdaptiveRatios(RatioRule("success", step=0.1, every=2), bounds, state=state)

    tasks = {"right": named("right"), "hopeless": named("hopeless", hopeless)}
    shares = {"right": (1.0, None), "hopeless": (1.0, None)}
    with Ledger.create(tmp_path) as ledger:
        source = source_of(ledger, tasks, shares, ratios=ratios())
        source.start()
        for index in range(20):
            assert await source.cut(1, TIMEOUT) is not None
            ledger.commit_batch("rl", index, index + 1)
        found = source.sharing.mix.ratios
        assert found == pytest.approx({"right": 0.9, "hopeless": 0.1})
        window = source.take_window().tasks
        assert window["hopeless"].dropped > 0 == window["hopeless"].trained
        assert window["right"].trained == 40
        assert window["right"].turns == len(window["right"].seconds) == window["right"].finished
        middle, late = (window["right"].seconds_at(q) for q in (0.5, 0.9))
        assert middle is not None
        assert late is not None
        assert 0 <= middle <= late
        await source.stop()
        state, kept = source.sharing.mix.state, ledger.get_state(ratios_key("rl"))
    with Ledger.resume(tmp_path) as ledger:
        assert ledger.get_state(cursor_key("rl")) == state
        assert ledger.get_state(ratios_key("rl")) == kept
        again = source_of(ledger, tasks, shares, ratios=ratios(kept))
        assert again.sharing.mix.ratios == pytest.approx(found)


async def one_in(share: int, number: int, size: int = 4) -> RolloutResult:
    """Signal in one group of `share`; the others fail."""
    await asyncio.sleep(0)
    hit = number // size % share == 0 and number % size == 0
    return RolloutResult(Outcome.OK, {"reward": float(hit)})


async def test_a_batch_that_costs_too_much_is_smaller_and_says_so_once(ledger):
    told: list[str] = []
    _, source = build(
        ledger,
        ScriptedTask(lambda number, _: one_in(8, number)),
        concurrency=4,
        groups_per_batch=4,
        dynamic=OvergenerationConfig(4.0, "shrink"),
        report=told.append,
    )
    source.start()
    sizes = []
    for index in range(5):
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        sizes.append(sum(batch.tasks.values()))
        ledger.commit_batch("rl", index, index + 1)
    await source.stop()
    assert sizes == [2] * 5  # sixteen groups each, of which two have signal
    (line,) = told
    assert "16 groups were generated and 2 with signal wait for a batch of 4" in line
    assert "toy 2 of 16 at a pass rate of 3.1%" in line
    assert "make toy easier" in line
    window = source.take_window()
    assert window.small_batches == 5
    counts = window.of("toy")
    assert counts.decided / counts.trained == pytest.approx(8, rel=0.1)
    assert counts.with_signal / counts.decided == pytest.approx(1 / 8, rel=0.1)


async def test_a_stage_that_must_not_shrink_ends_with_remedies(ledger):
    async def always(number, instance):
        return RolloutResult(Outcome.OK, {"reward": 1.0})

    _, source = build(
        ledger, ScriptedTask(always), dynamic=OvergenerationConfig(3.0, "fail"), concurrency=4
    )
    source.start()
    with pytest.raises(
        UserError, match=r"6 groups .* toy 0 of 6 at a pass rate of 100.0%; make"
    ) as e:
        await source.cut(1, TIMEOUT)
    await source.stop()
    assert "make toy harder ([tasks.toy]" in str(e.value)
    assert "dynamic.max_overgeneration = 3" in str(e.value)


async def test_failed_environments_are_no_over_generation(ledger):
    async def script(number, instance):
        if number < 32:
            raise RuntimeError("boom")
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    _, source = build(
        ledger, ScriptedTask(script), dynamic=OvergenerationConfig(2.0, "fail"), concurrency=4
    )
    source.start()
    assert await source.cut(1, TIMEOUT) is not None
    await source.stop()


async def test_estimates_are_kept_with_the_decision_they_come_from(tmp_path):
    """After a crash at any moment the ledger's estimates are those of its decided groups."""

    def curriculum(ledger: Ledger | None) -> Curriculum:
        return Curriculum(
            CurriculumConfig(sampling="window", window=(0.0, 0.9), explore=0.0, half_life=1e9),
            choices=ledger.get_state(choices_key("rl")) if ledger else None,
            difficulty=ledger.get_state(difficulty_key("rl")) if ledger else None,
        )

    async def script(number, instance):
        await asyncio.sleep(0)
        solved = 1.0 if instance.family == "family0" else float(number % 2)
        return RolloutResult(Outcome.OK, {"reward": solved})

    def task_of() -> ScriptedTask:
        task = ScriptedTask(script)
        task.train_seed = lambda index: index  # both families
        return task

    def mix(task, ledger=None, state=None) -> TaskMix:
        held_out = HeldOut({"toy": task})
        return mix_of(task, state=state, held_out=held_out, curriculum=curriculum(ledger))

    with Ledger.create(tmp_path) as ledger:
        task = task_of()
        _, source = build(ledger, task, mix=mix(task), ready_batches=50)
        source.start()
        batch = await source.cut(1, TIMEOUT)
        assert batch is not None
        ledger.commit_batch("rl", 0, 1)
        ledger.checkpointed("rl", 1, "ck1")
        # A crash: rollouts are cut off, nothing is told to stop.
        assert source._producer is not None
        source._producer.cancel()
        for running in list(source._rollouts):
            running.cancel()
        await asyncio.gather(*source._rollouts, return_exceptions=True)
        memory = source.sharing.mix.curriculum
        assert memory is not None

    with Ledger.resume(tmp_path) as ledger:
        kept = curriculum(ledger)
        assert kept.difficulty.state == memory.difficulty.state
        assert kept.choices == memory.choices
        decided = {s.group_id for s in ledger.sessions(stage="rl") if s.outcome is Outcome.OK}
        assert sum(e.groups for e in kept.difficulty.state.kinds.values()) <= len(decided)
        recovery = ledger.recover("rl")
        task = task_of()
        state = ledger.get_state(cursor_key("rl"))
        _, source = build(ledger, task, mix=mix(task, ledger, state), ready_batches=50)
        resumed = source.sharing.mix.curriculum
        assert resumed is not None
        before = resumed.difficulty.state.decided["toy"]
        source.resume(recovery)
        source.start()
        for index in range(1, 12):
            batch = await source.cut(1, TIMEOUT)
            assert batch is not None
            ledger.commit_batch("rl", batch.index, index + 1)
        await source.stop()
        # It goes on from there: the family that is always solved is known by now and left out.
        assert resumed.difficulty.state.decided["toy"] > before
        newest = sorted({(s.group_id, s.instance["family"]) for s in ledger.sessions(stage="rl")})
        assert {family for _, family in newest[-10:]} == {"family1"}
        assert resumed.counts["toy"]["skipped.too_easy"] > 0


async def test_evaluation_counts_by_family_and_continues(ledger):
    calls = []

    async def script(number, instance):
        calls.append(instance.seed)
        if instance.seed == 5:
            raise RuntimeError("environment")
        return RolloutResult(Outcome.OK, {"reward": float(instance.seed % 4 == 1)})

    task = ScriptedTask(script)
    gate = ScriptedGate(ledger)
    runner = RolloutRunner(tasks={"toy": task}, gate=gate, ledger=ledger, base_url="", model="m")
    instances = [task.instance(task.evaluation_seed(i)) for i in range(6)]

    async def measure():
        return await evaluate(
            "start",
            instances,
            runner=runner,
            ledger=ledger,
            temperature=1.0,
            concurrency=3,
            progress=lambda _: None,
        )

    result = await measure()
    assert (result["n"], result["ok"], result["env_failed"]) == (5, 2, 1)
    assert result["families"] == {"family1": [2, 5]}
    assert result["multi_turn"] == [2, 5]
    assert result["instances"] == {"1": 1, "3": 0, "7": 0, "9": 1, "11": 0}
    again = await measure()
    assert {**again, "wall_s": 0} == {**result, "wall_s": 0}
    assert len(calls) == 6
    assert ledger.drop_counts()[DropReason.EVALUATION] == 6
