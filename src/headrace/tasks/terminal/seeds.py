"""Problems from seeds, with training and evaluation apart by construction.

Even seeds train, odd seeds evaluate. A problem's content hash decides which side may use it, so
that an evaluation problem never equals a training problem even though their seeds differ: a draw
whose hash belongs to the other side is thrown away and drawn again.
"""

import hashlib
from collections.abc import Sequence
from random import Random

from headrace.errors import UserError
from headrace.sandbox.types import FileEntry
from headrace.tasks.terminal.files import Tree
from headrace.tasks.terminal.problem import Family, Mistake, Problem, Step

LEVELS = (1, 2, 3)

_EVALUATION_SHARE = 8
"""One content in this many belongs to evaluation."""

_MAX_DRAWS = 2000


def train_seed(index: int) -> int:
    """The `index`-th training seed."""
    return 2 * _checked(index, "index")


def evaluation_seed(index: int) -> int:
    """The `index`-th evaluation seed. No training seed has the same seed or the same content."""
    return 2 * _checked(index, "index") + 1


def is_evaluation(seed: int) -> bool:
    """Which side a seed is on."""
    return seed % 2 == 1


def choose_kind(
    seed: int, families: Sequence[Family], level_weights: Sequence[float]
) -> tuple[Family, int]:
    """Family and level of a seed.

    Any run of `len(families)` consecutive seeds of one side that starts at a multiple of that
    number holds each family once, so small evaluations are balanced.
    """
    _checked(seed, "seed")
    block, position = divmod(seed // 2, len(families))
    order = list(range(len(families)))
    Random(f"terminal order {seed % 2} {block}").shuffle(order)
    level = Random(f"terminal level {seed}").choices(LEVELS, level_weights)[0]
    return families[order[position]], level


def make_problem(seed: int, family: Family, level: int) -> Problem:
    """The problem of a seed: a pure function of its arguments.

    Raises:
        UserError: a negative seed.
    """
    _checked(seed, "seed")
    for draw in range(_MAX_DRAWS):
        problem = _draw(Random(f"terminal {seed} {family.name} {level} {draw}"), family, level)
        if problem is None:
            continue
        belongs_to_evaluation = int(content_hash(problem)[:8], 16) % _EVALUATION_SHARE == 0
        if belongs_to_evaluation == is_evaluation(seed):
            return problem
    raise RuntimeError(f"terminal family {family.name}: no problem in {_MAX_DRAWS} draws")


def content_hash(problem: Problem) -> str:
    """Hex digest of everything an agent can see of a problem: instruction and files."""
    digest = hashlib.sha256(problem.instruction.encode())
    for path, entry in sorted(problem.files.items()):
        digest.update(f"\0{path}\0{entry.kind}\0{entry.mode}\0{len(entry.data)}\0".encode())
        digest.update(entry.data)
    return digest.hexdigest()


def _draw(rng: Random, family: Family, level: int) -> Problem | None:
    draft = family.build(Tree(rng, level))
    if draft is None:
        return None
    slots = dict(draft.slots)
    instruction = rng.choice(draft.phrasings or family.phrasings).format(**slots)
    steps = tuple(_fill(step, slots) for step in draft.steps or family.steps)
    # The tree's own order tells what was written first; sorted, it tells nothing.
    files: dict[str, FileEntry] = dict(sorted(draft.tree.files.items()))
    return Problem(family, level, instruction, files, draft.goal, steps)


def _fill(step: Step, slots: dict[str, str]) -> Step:
    """Put the slots into a step's commands and leave `{out}` for later."""

    def fill(command: str) -> str:
        return command.format(**slots, out="{out}")

    return Step(fill(step.right), tuple(Mistake(fill(m.command), m.weight) for m in step.mistakes))


def _checked(number: int, field: str) -> int:
    if number < 0:
        raise UserError(f"terminal tasks: {field} is {number}; use 0 or more")
    return number
