"""Tasks come in their ratios, and nothing that is measured is ever given out."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.rollout.choosing.curriculum import Curriculum, CurriculumConfig
from headrace.rollout.choosing.mixing import MOST_OWED, MOST_SKIPS, HeldOut, TaskMix, TaskShare
from headrace.tasks.types import TaskInstance


class FewQuestions:
    """Instances whose content repeats: seeds that are equal modulo `contents` ask the same."""

    def __init__(self, name: str, contents: int) -> None:
        self.name = name
        self.contents = contents

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance(self.name, seed, "f", 1, 1)

    def train_seed(self, index: int) -> int:
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        return f"{self.name} {instance.seed % self.contents}"

    async def rollout(self, instance, endpoint):
        raise NotImplementedError

    def share(self, ratio: float = 1.0) -> TaskShare:
        return TaskShare(self.name, ratio, lambda i: self.instance(self.train_seed(i)))


async def take(mix: TaskMix, count: int) -> list[TaskInstance]:
    return [await mix.next() for _ in range(count)]


async def test_one_task_gives_its_instances_in_order():
    mix = TaskMix([FewQuestions("a", 100).share()])
    assert [i.seed for i in await take(mix, 4)] == [0, 2, 4, 6]
    assert mix.groups == 4


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.05, 10.0), min_size=1, max_size=5))
async def test_every_task_stays_near_its_ratio_at_all_times(ratios):
    mix = TaskMix([FewQuestions(f"t{i}", 9).share(r) for i, r in enumerate(ratios)])
    given_out = dict.fromkeys(mix.ratios, 0)
    for n in range(1, 120):
        given_out[(await mix.next()).task] += 1
        for name, ratio in mix.ratios.items():
            assert abs(given_out[name] - ratio * n) < max(1.0, len(ratios) - 1)
    assert mix.share_of("t0") == given_out["t0"] / 119


async def test_a_saved_state_goes_on_exactly_where_it_was():
    def shares():
        return [FewQuestions("a", 9).share(0.7), FewQuestions("b", 9).share(0.3)]

    whole = await take(TaskMix(shares()), 40)
    first = TaskMix(shares())
    begun = await take(first, 17)
    rest = await take(TaskMix(shares(), state=first.state), 23)
    assert begun + rest == whole
    # Runs of one task kept a number; it means the same.
    (after,) = await take(TaskMix([FewQuestions("a", 9).share()], state=5), 1)
    assert after.seed == 10


async def test_what_is_measured_is_skipped_and_counted_whatever_its_seed():
    task = FewQuestions("a", 7)
    measured = [task.instance(task.evaluation_seed(i)) for i in range(3)]  # contents 1, 3, 5
    mix = TaskMix([task.share()], held_out=HeldOut({"a": task}, measured))
    contents = {task.content_id(i) for i in await take(mix, 60)}
    assert contents == {f"a {c}" for c in (0, 2, 4, 6)}
    assert mix.skipped["a"] > 0
    assert mix.groups == 60
    # Skipped ones are not asked about again after a resume.
    again = TaskMix([task.share()], state=mix.state, held_out=HeldOut({"a": task}, measured))
    assert (await again.next()).seed > 2 * (60 + mix.skipped["a"]) - 2


async def test_a_task_with_nothing_left_is_an_error():
    task = FewQuestions("a", 1)
    held_out = HeldOut({"a": task}, [task.instance(1)])
    with pytest.raises(UserError, match=f"task a: {MOST_SKIPS} training instances in a row"):
        await TaskMix([task.share()], held_out=held_out).next()


@pytest.mark.parametrize("ratios", [(), (1.0, 0.0), (1.0, -1.0)])
def test_bad_shares_are_refused(ratios):
    with pytest.raises(ValueError, match="ratios above 0"):
        TaskMix([FewQuestions(f"t{i}", 1).share(r) for i, r in enumerate(ratios)])


async def test_ratios_that_change_count_from_then_on():
    """The past is settled by the ratios of its time: no burst makes up for it."""
    tasks = [FewQuestions(n, 9) for n in "ab"]
    mix = TaskMix([t.share() for t in tasks])
    await take(mix, 40)
    mix.retarget({"a": 0.9, "b": 0.1})
    assert [i.task for i in await take(mix, 40)].count("a") == 36
    assert mix.wanted_share_of("a") == pytest.approx(0.7)
    assert mix.share_of("a") == pytest.approx(0.7)
    assert mix.targets == {"a": 0.5, "b": 0.5}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.05, 10.0), min_size=2, max_size=4),
    st.lists(st.sets(st.integers(0, 3)), min_size=100, max_size=300),
)
async def test_room_that_full_tasks_leave_goes_to_others_and_is_owed(ratios, histories):
    """Who is free gets the group; debts sum to nothing and stay bounded, whoever is full."""
    mix = TaskMix([FewQuestions(f"t{i}", 9).share(r) for i, r in enumerate(ratios)])
    for full in histories:
        names = {f"t{i}" for i in full}
        name = mix.choose(names)
        if name is None:
            assert names >= set(mix.ratios)
            continue
        assert name not in names
        await mix.next(name)
    owed = [account[3] for account in mix.state.values()]
    assert sum(owed) == pytest.approx(0.0, abs=1e-6)
    assert max(owed) <= MOST_OWED + 1
    wanted = sum(account[2] for account in mix.state.values())
    assert wanted == pytest.approx(mix.groups)


async def test_a_task_that_was_full_long_does_not_fill_batches_afterwards():
    tasks = [FewQuestions(n, 9) for n in "abc"]
    mix = TaskMix([tasks[0].share(2.0), tasks[1].share(2.0), tasks[2].share(1.0)])
    during = [(await mix.next(mix.choose({"a"}))).task for _ in range(3000)]
    # The others keep their own ratio, 2 to 1.
    assert during[-300:].count("b") == pytest.approx(200, abs=2)
    after = [i.task for i in await take(mix, 200)]
    assert after[:30] == ["a"] * 30
    assert after[-50:].count("a") == pytest.approx(20, abs=1)


async def test_what_trained_is_counted_and_kept():
    tasks = [FewQuestions(n, 9) for n in "ab"]
    mix = TaskMix([t.share() for t in tasks])
    assert mix.trained_share_of("a") is None
    await take(mix, 4)
    mix.trained("a", 3)
    mix.trained("b", 1)
    again = TaskMix([t.share() for t in tasks], state=mix.state)
    assert again.trained_share_of("a") == 0.75
    # What older versions kept: positions and groups.
    older = TaskMix([t.share() for t in tasks], state={"a": [9, 9], "b": [7, 7]})
    assert [i.task for i in await take(older, 4)] == ["b", "b", "a", "b"]


async def test_nothing_is_booked_before_an_instance_is_found():
    """Another writer may save the state while a problem is being looked at."""
    task = FewQuestions("a", 7)
    mix = TaskMix([task.share()], held_out=HeldOut({"a": task}, [task.instance(1)]))
    before = mix.state
    work = mix.next()
    work.send(None)  # up to where it waits for the content
    assert mix.state == before
    work.close()


# -- ways round the guard ----------------------------------------------------------------------


class Liar(FewQuestions):
    """Never calls a problem what it called it before."""

    def __init__(self) -> None:
        super().__init__("liar", 1)
        self.asked = 0

    def content_id(self, instance: TaskInstance) -> str:
        self.asked += 1
        return f"content {self.asked}"


async def test_measured_seeds_are_held_out_whatever_the_service_calls_them():
    liar = Liar()
    held_out = HeldOut({"liar": liar}, [liar.instance(seed) for seed in (1, 4, 8)])
    share = TaskShare("liar", 1.0, liar.instance)  # and it gives measured seeds for training
    given_out = {i.seed for i in await take(TaskMix([share], held_out=held_out), 30)}
    assert not given_out & {1, 4, 8}


async def test_a_problem_that_one_task_measures_is_held_out_of_all():
    """Two tasks may be one service with other options."""

    class SameQuestions(FewQuestions):
        def content_id(self, instance: TaskInstance) -> str:
            return f"question {instance.seed % self.contents}"

    tasks = {name: SameQuestions(name, 7) for name in ("one", "two")}
    measured = [tasks["one"].instance(seed) for seed in (1, 3)]
    mix = TaskMix([tasks["two"].share()], held_out=HeldOut(tasks, measured))
    assert not {i.seed % 7 for i in await take(mix, 60)} & {1, 3}


@pytest.mark.parametrize("sampling", ["uniform", "window", "thompson"])
async def test_a_curriculum_cannot_give_out_what_is_measured(sampling):
    task = FewQuestions("a", 7)
    measured = [task.instance(task.evaluation_seed(i)) for i in range(3)]  # contents 1, 3, 5
    config = CurriculumConfig(sampling=sampling, repeat_share=0.5, repeat_after=2)
    curriculum = Curriculum(config)
    held_out = HeldOut({"a": task}, measured)
    mix = TaskMix([task.share()], held_out=held_out, curriculum=curriculum)
    for n in range(80):
        instance = await mix.next()
        assert instance not in held_out
        curriculum.observe(instance, [0.0, float(n % 3 == 0)])
    assert mix.skipped["a"] > 0


async def test_an_unsolved_problem_that_is_measured_after_a_resume_is_not_repeated():
    task = FewQuestions("a", 50)
    config = CurriculumConfig(repeat_share=1.0, repeat_after=1)
    curriculum = Curriculum(config)
    mix = TaskMix([task.share()], held_out=HeldOut({"a": task}), curriculum=curriculum)
    for instance in await take(mix, 10):
        curriculum.observe(instance, [0.0, 0.0])
    waiting = [w.instance for w in curriculum.state.waiting]
    assert len(waiting) == 10
    held_out = HeldOut({"a": task}, waiting[:4])
    resumed = Curriculum(config, choices=curriculum.choices)
    resumed.difficulty.state.decided["a"] = 100
    mix = TaskMix([task.share()], state=mix.state, held_out=held_out, curriculum=resumed)
    given_out = await take(mix, 8)
    assert given_out[:6] == waiting[4:]
    assert all(i not in held_out for i in given_out)
    assert mix.skipped["a"] == 4
    assert not resumed.state.waiting


def test_what_was_held_out_once_stays_so():
    task = FewQuestions("a", 50)
    first = HeldOut({"a": task}, [task.instance(1), task.instance(3)])
    both = HeldOut({"a": task}, [task.instance(3), task.instance(5)]).together_with(first.saved)
    assert [task.instance(s) in both for s in (1, 3, 5, 7, 51)] == [True, True, True, False, True]
    assert len(both) == 3
    assert both.together_with(first.saved).saved == both.saved


async def test_a_task_that_answers_at_once_needs_no_thread():
    """On a busy loop a hop to a thread and back costs more than the answer."""
    task = FewQuestions("a", 7)
    share = TaskShare("a", 1.0, lambda i: task.instance(task.train_seed(i)), blocking=False)
    measured = [task.instance(task.evaluation_seed(0))]
    curriculum = Curriculum(CurriculumConfig(sampling="uniform"))
    mix = TaskMix([share], held_out=HeldOut({"a": task}, measured), curriculum=curriculum)
    work = mix.next()
    with pytest.raises(StopIteration) as found:
        work.send(None)  # it never waits
    assert found.value.value not in HeldOut({"a": task}, measured)


@pytest.mark.parametrize(
    ("config", "hops"),
    [
        (None, 1),
        (CurriculumConfig(), 1),
        (CurriculumConfig(sampling="window", explore=0.0), 2),
        (CurriculumConfig(sampling="thompson", explore=0.0), 2),
    ],
)
async def test_a_task_that_takes_its_time_is_asked_in_few_hops(config, hops, monkeypatch):
    """What is surely chosen is drawn and named in one; else only what is chosen is named."""
    task = FewQuestions("a", 1000)
    held_out = HeldOut({"a": task}, [task.instance(task.evaluation_seed(0))])
    curriculum = None if config is None else Curriculum(config)
    mix = TaskMix([task.share()], held_out=held_out, curriculum=curriculum)
    asked = []

    async def to_thread(question):
        asked.append(question)
        return question()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    await take(mix, 20)
    assert len(asked) == 20 * hops
