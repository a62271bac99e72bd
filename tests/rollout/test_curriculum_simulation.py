"""Students of known skill learn from groups with signal: a curriculum needs fewer groups.

No model: a student passes a problem of a level with the logistic of its skill there, and a group
whose rollouts differ makes it better there, and a little at the level above.
"""

import itertools
import math
import statistics
from random import Random

import pytest

from headrace.rollout.choosing.curriculum import Curriculum, CurriculumConfig
from headrace.tasks.types import TaskInstance

LEVELS = 6
GROUP = 8
MOST_GROUPS = 6000
GOAL = 0.65
"""Mean pass rate over all levels at which a student is done."""


class Student:
    """Skill by level, as log odds; problems of a level differ by a normal offset."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.skill = [1.0 - 2.0 * level for level in range(LEVELS)]

    @property
    def pass_rate(self) -> float:
        return statistics.mean(logistic(skill) for skill in self.skill)

    def attempt(self, instance: TaskInstance) -> list[float]:
        level = instance.level - 1
        p = logistic(self.skill[level] + Random(instance.seed).gauss(0.0, 1.0))
        rewards = [float(self.rng.random() < p) for _ in range(GROUP)]
        if 0.0 < sum(rewards) < GROUP:
            for at, step in ((level, 0.04), (level + 1, 0.024)):
                if at < LEVELS:
                    self.skill[at] += step
        return rewards


def logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def instance(position: int) -> TaskInstance:
    level = 1 + Random(f"level {position}").randrange(LEVELS)
    return TaskInstance("t", position, f"family {position % 2}", level, 1)


async def groups_needed(config: CurriculumConfig, seed: int) -> tuple[int, float]:
    """Groups until the goal, and the share of them with signal."""
    student = Student(Random(seed))
    curriculum = Curriculum(config, seed=seed)
    positions = itertools.count(seed * 1_000_000)

    async def draw(count: int) -> list[TaskInstance]:
        return [instance(next(positions)) for _ in range(count)]

    signal = 0
    for group in range(1, MOST_GROUPS):
        problem = await curriculum.choose("t", draw)
        if not curriculum.take(problem, str(problem.seed)):
            continue
        rewards = student.attempt(problem)
        signal += 0.0 < sum(rewards) < GROUP
        curriculum.observe(problem, rewards)
        if student.pass_rate >= GOAL:
            return group, signal / group
    raise AssertionError(f"{config.sampling}: {student.pass_rate} after {MOST_GROUPS} groups")


@pytest.mark.parametrize("seed", range(3))
async def test_a_goal_is_reached_with_fewer_groups(seed):
    uniform, signal = await groups_needed(CurriculumConfig(), seed)
    window, in_window = await groups_needed(CurriculumConfig(sampling="window"), seed)
    chosen, with_choice = await groups_needed(CurriculumConfig(sampling="thompson"), seed)
    levels, _ = await groups_needed(
        CurriculumConfig(sampling="thompson", start_level=1, promote_at=0.5), seed
    )
    assert signal < in_window < with_choice
    assert uniform > 1.05 * window
    assert uniform > 1.3 * chosen
    assert uniform > 1.5 * levels
