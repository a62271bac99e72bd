"""What a curriculum gives out and what it passes over, and that it remembers exactly."""

import itertools
import json
from collections import Counter
from collections.abc import Callable

import pytest

from headrace.rollout.choosing.curriculum import (
    MOST_LOOKS,
    MOST_REFUSALS,
    MOST_TRIES,
    MOST_WAITING,
    Curriculum,
    CurriculumConfig,
    choices_key,
    difficulty_key,
)
from headrace.tasks.types import TaskInstance

SOLVED, FAILED, MIXED = [1.0] * 8, [0.0] * 8, [0.0, 1.0] * 4


class Problems:
    """Instances whose families follow each other; a level may belong to each."""

    def __init__(self, *families: str, levels: tuple[int, ...] = (1,)) -> None:
        self.families = families
        self.levels = levels
        self.position = 0

    async def draw(self, count: int) -> list[TaskInstance]:
        return [self.next() for _ in range(count)]

    def next(self) -> TaskInstance:
        at, self.position = self.position, self.position + 1
        kind = at % len(self.families)
        level = self.levels[kind % len(self.levels)]
        return TaskInstance("t", at, self.families[kind], level, 1)


async def give(
    curriculum: Curriculum,
    problems: Problems,
    count: int,
    rewards: Callable[[TaskInstance], list[float]] | None = None,
) -> list[TaskInstance]:
    """The next problems, each decided at once when `rewards` are given."""
    found = []
    for _ in range(count):
        while True:
            instance = await curriculum.choose("t", problems.draw)
            if curriculum.take(instance, f"content {instance.seed}"):
                break
        found.append(instance)
        if rewards is not None:
            curriculum.observe(instance, rewards(instance))
    return found


def by_family(instance: TaskInstance) -> list[float]:
    return {"easy": SOLVED, "hard": FAILED}.get(instance.family, MIXED)


async def test_without_a_curriculum_problems_come_in_their_own_order():
    curriculum = Curriculum(CurriculumConfig())
    found = await give(curriculum, Problems("easy", "hard"), 50, by_family)
    assert [i.seed for i in found] == list(range(50))
    metrics = curriculum.metrics()
    assert metrics["curriculum.t.in_order"] == 50
    assert metrics["difficulty.t.level1.low"] < 0.5 < metrics["difficulty.t.level1.high"]
    assert not curriculum.state.open  # nothing asks for it, so it is not kept
    assert "curriculum.t.in_order" not in curriculum.metrics()  # counts are since the last look


async def test_a_window_passes_over_what_is_surely_outside_and_counts_why():
    config = CurriculumConfig(sampling="window", explore=0.1, half_life=1e9)
    curriculum = Curriculum(config, seed=1)
    problems = Problems("easy", "hard", "right")
    await give(curriculum, problems, 30, by_family)
    curriculum.metrics()
    found = Counter(i.family for i in await give(curriculum, problems, 300, by_family))
    metrics = curriculum.metrics()
    # Only exploration, a tenth of the groups, meets the other two.
    assert 10 <= metrics["curriculum.t.explored"] <= 55
    assert found["easy"] + found["hard"] <= metrics["curriculum.t.explored"]
    assert min(found["easy"], found["hard"]) > 0
    given = sum(metrics[f"curriculum.t.{n}"] for n in ("explored", "chosen"))
    assert given == 300
    for reason in ("too_easy", "too_hard"):
        assert metrics[f"curriculum.t.skipped.{reason}"] > 200


async def test_what_was_outside_comes_back_when_its_evidence_is_old():
    config = CurriculumConfig(sampling="window", explore=0.0, half_life=20.0)
    curriculum = Curriculum(config)
    problems = Problems("hard", "right")
    found = await give(curriculum, problems, 400, by_family)
    share = Counter(i.family for i in found)["hard"] / 400
    assert 0.01 < share < 0.3


async def test_thompson_prefers_the_kind_near_its_target():
    rates = {"easy": 0.85, "right": 0.5, "hard": 0.15}

    def rewards(instance: TaskInstance) -> list[float]:
        ones = round(20 * rates[instance.family])
        return [1.0] * ones + [0.0] * (20 - ones)

    for target, preferred in ((0.5, "right"), (0.85, "easy"), (0.15, "hard")):
        config = CurriculumConfig(sampling="thompson", target=target, half_life=1e9)
        curriculum = Curriculum(config, seed=3)
        problems = Problems(*rates)
        found = Counter(i.family for i in await give(curriculum, problems, 200, rewards))
        assert found.most_common(1)[0][0] == preferred
        assert found[preferred] > 130
        metrics = curriculum.metrics()
        passed = metrics["curriculum.t.skipped.passed_over"]
        assert passed == metrics["curriculum.t.chosen"] * (config.candidates - 1)


async def test_when_nothing_fits_the_first_problem_is_attempted_all_the_same():
    config = CurriculumConfig(sampling="window", explore=0.0, half_life=1e9)
    curriculum = Curriculum(config)
    problems = Problems("hard")
    await give(curriculum, problems, 20, by_family)
    before = problems.position
    (found,) = await give(curriculum, problems, 1)
    assert found.seed == before
    assert problems.position == before + MOST_LOOKS
    assert curriculum.metrics()["curriculum.t.none_suitable"] >= 1


async def test_levels_are_unlocked_one_by_one_and_never_locked_again():
    config = CurriculumConfig(start_level=1, promote_at=0.6, explore=0.0)
    curriculum = Curriculum(config)
    problems = Problems("a", "b", "c", levels=(1, 2, 3))
    highest = 1
    solved = {1}
    for _ in range(200):
        (found,) = await give(
            curriculum, problems, 1, lambda i: SOLVED if i.level in solved else FAILED
        )
        assert found.level <= highest + 1
        highest = max(highest, found.level)
        assert curriculum.state.level.get("t", 1) <= 2
    assert highest == 2  # level 2 was never passed, so level 3 stays locked
    metrics = curriculum.metrics()
    assert metrics["curriculum.t.promoted"] == 1
    assert metrics["curriculum.t.level"] == 2
    assert metrics["curriculum.t.skipped.locked"] > 50
    solved.add(2)
    await give(curriculum, problems, 400, lambda i: SOLVED if i.level in solved else FAILED)
    assert curriculum.state.level["t"] == 3
    await give(curriculum, problems, 50, lambda i: FAILED)
    assert curriculum.state.level["t"] == 3


async def test_a_task_without_the_first_level_begins_at_its_own_first():
    curriculum = Curriculum(CurriculumConfig(start_level=1, explore=0.0))
    found = await give(curriculum, Problems("a", "b", levels=(4, 5)), 6, by_family)
    assert {i.level for i in found[1:]} == {4}


async def test_unsolved_problems_come_back_until_solved_or_given_up():
    config = CurriculumConfig(repeat_share=0.5, repeat_after=5)
    curriculum = Curriculum(config)
    problems = Problems("f")
    tries: Counter[int] = Counter()

    def rewards(instance: TaskInstance) -> list[float]:
        tries[instance.seed] += 1
        if instance.seed == 0:
            return FAILED
        if instance.seed == 1:
            return SOLVED if tries[1] == 2 else FAILED
        return MIXED

    found = await give(curriculum, problems, 200, rewards)
    assert tries[0] == MOST_TRIES
    assert tries[1] == 2
    assert max(tries[seed] for seed in range(2, 60)) == 1
    at = [n for n, i in enumerate(found) if i.seed == 0]
    assert all(b - a > 5 for a, b in itertools.pairwise(at))
    metrics = curriculum.metrics()
    assert metrics["curriculum.t.repeated"] == MOST_TRIES - 1 + 1
    assert metrics["curriculum.t.given_up"] == 1
    assert metrics["curriculum.t.waiting"] == 0


async def test_no_more_unsolved_problems_wait_than_the_bound():
    curriculum = Curriculum(CurriculumConfig(repeat_share=0.1, repeat_after=10_000))
    await give(curriculum, Problems("f"), MOST_WAITING + 20, lambda i: FAILED)
    assert len(curriculum.state.waiting) == MOST_WAITING
    assert curriculum.metrics()["curriculum.t.given_up"] == 20


async def test_a_repeat_that_must_not_train_leaves_the_queue():
    curriculum = Curriculum(CurriculumConfig(repeat_share=1.0, repeat_after=1))
    problems = Problems("f")
    await give(curriculum, problems, 1, lambda i: FAILED)
    await give(curriculum, problems, 1, lambda i: MIXED)
    instance = await curriculum.choose("t", problems.draw)
    assert instance.seed == 0
    curriculum.leave()
    assert not curriculum.state.waiting
    assert (await curriculum.choose("t", problems.draw)).seed != 0


async def test_a_problem_known_to_be_outside_is_refused_under_any_seed():
    """One kind, of which half the problems are always solved; contents repeat under new seeds."""
    config = CurriculumConfig(sampling="window", explore=0.0, half_life=1e9)
    curriculum = Curriculum(config)
    problems = Problems("f")
    given: list[str] = []
    for _ in range(160):
        while True:
            instance = await curriculum.choose("t", problems.draw)
            content = f"content {instance.seed % 6}"
            if curriculum.take(instance, content):
                break
        given.append(content)
        curriculum.observe(instance, SOLVED if instance.seed % 2 else MIXED)
    counts = Counter(given)
    assert all(counts[f"content {n}"] > 30 for n in (0, 2, 4))
    assert all(counts[f"content {n}"] <= 15 for n in (1, 3, 5))
    assert curriculum.metrics()["curriculum.t.skipped.seen_too_easy"] > 50


async def test_refusals_of_single_problems_end():
    config = CurriculumConfig(sampling="window", window=(0.45, 0.55), explore=0.0, half_life=1e9)
    curriculum = Curriculum(config)
    problems = Problems("f")
    for number in range(20):  # the kind is inside the window, its one problem is not
        (found,) = await give(curriculum, problems, 1)
        curriculum.observe(found, SOLVED if number % 2 else FAILED)
    for _ in range(20):
        curriculum.difficulty.observe("t", "f", 1, SOLVED, "the only one")
        curriculum.difficulty.observe("t", "f", 1, FAILED)
    refused = 0
    instance = await curriculum.choose("t", problems.draw)
    while not curriculum.take(instance, "the only one"):
        refused += 1
        instance = await curriculum.choose("t", problems.draw)
    assert refused == MOST_REFUSALS


@pytest.mark.parametrize("sampling", ["uniform", "window", "thompson"])
async def test_a_saved_curriculum_goes_on_exactly_where_it_was(sampling):
    config = CurriculumConfig(
        sampling=sampling, start_level=1, repeat_share=0.2, repeat_after=8, half_life=50.0
    )

    def rewards(instance: TaskInstance) -> list[float]:
        return (SOLVED, MIXED, FAILED, MIXED)[instance.seed % 4]

    def problems() -> Problems:
        return Problems("a", "b", "c", levels=(1, 2, 3))

    whole = await give(Curriculum(config, seed=5), problems(), 120, rewards)
    first, order = Curriculum(config, seed=5), problems()
    begun = await give(first, order, 50, rewards)
    position = order.position  # which the mix of tasks keeps
    # A choice that had only begun when the process died leaves nothing behind.
    await first.choose("t", order.draw)
    kept: dict[str, str] = {}
    first.save("rl", lambda name, value: kept.update({name: json.dumps(value)}))
    second = Curriculum(
        config,
        seed=5,
        choices=json.loads(kept[choices_key("rl")]),
        difficulty=json.loads(kept[difficulty_key("rl")]),
    )
    order.position = position
    rest = await give(second, order, 70, rewards)
    assert begun + rest == whole
