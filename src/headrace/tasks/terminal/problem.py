"""The parts of a terminal problem: what is asked, in which files, how it is checked and solved.

A `Family` is a kind of problem; building it with a seeded tree gives a `Draft`, and wording that
gives a `Problem`. Nothing here runs a command.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.sandbox.types import FileEntry
from headrace.tasks.terminal.files import Tree

STOP = ""
"""In place of a command: answer at once with what the previous command printed."""

DONE = "done"
"""The final message of a solution whose result is the state of the files."""

NOTHING = "none"
"""The answer a demonstrator gives when a command failed or printed nothing."""


@dataclass(frozen=True)
class AnswerGoal:
    """The agent's final message must equal `expected`.

    Attributes:
        expected: one line.
        is_path: a leading "./" of the agent's answer is ignored.
    """

    expected: str
    is_path: bool = False


@dataclass(frozen=True)
class StateGoal:
    """The work folder must end as `tree`: these files with this content, and no others.

    Attributes:
        tree: every expected file and directory by relative path.
        any_mode: files whose permission bits are not checked (new files: umask decides).
    """

    tree: Mapping[str, FileEntry]
    any_mode: frozenset[str] = frozenset()


Goal = AnswerGoal | StateGoal


@dataclass(frozen=True)
class Mistake:
    """A plausible wrong command and how often it is made relative to the step's other mistakes."""

    command: str
    weight: float = 1.0


@dataclass(frozen=True)
class Step:
    """One command of the reference solution.

    Commands are format strings over the draft's slots and `{out}`, the first line that the
    previous command printed.

    Attributes:
        right: the command that leads to the goal.
        mistakes: what a demonstrator might type instead; may be empty.
    """

    right: str
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True)
class Draft:
    """What a family builds: everything but the wording.

    Attributes:
        tree: the initial work folder.
        slots: values for phrasings and commands.
        goal: how the end is checked.
        steps: overrides the family's steps where their number depends on the instance.
        phrasings: overrides the family's phrasings where the slots choose between wordings.
    """

    tree: Tree
    slots: Mapping[str, str]
    goal: Goal
    steps: tuple[Step, ...] | None = None
    phrasings: tuple[str, ...] | None = None


def first_line(output: str) -> str:
    """The first line of what a command printed."""
    return output.strip().split("\n", 1)[0].strip()


def without_count(output: str) -> str:
    """The first line without the count that `uniq -c` puts before it."""
    return re.sub(r"^\d+\s+", "", first_line(output))


@dataclass(frozen=True)
class Family:
    """A kind of problem.

    Attributes:
        name: stable identifier.
        phrasings: wordings of the instruction, chosen at random.
        steps: the reference solution and its plausible mistakes.
        build: makes a draft in a fresh tree, or None when the draw does not separate right from
            wrong solutions (another draw is then made).
        answer_from: reads the answer out of the last command's output.
    """

    name: str
    phrasings: tuple[str, ...]
    steps: tuple[Step, ...]
    build: Callable[[Tree], Draft | None]
    answer_from: Callable[[str], str] = first_line


def family(
    *,
    phrasings: tuple[str, ...],
    steps: tuple[Step, ...] = (),
    answer_from: Callable[[str], str] = first_line,
) -> Callable[[Callable[[Tree], Draft | None]], Family]:
    """Make the decorated build function a `Family` named after it."""

    def decorate(build: Callable[[Tree], Draft | None]) -> Family:
        return Family(build.__name__, phrasings, steps, build, answer_from)

    return decorate


@dataclass(frozen=True)
class Problem:
    """One concrete problem.

    Attributes:
        family: its kind.
        level: 1 (easiest) to 3.
        instruction: what the agent is told.
        files: the initial work folder.
        goal: hidden from the agent.
        steps: the reference solution with every slot but `{out}` filled in.
    """

    family: Family
    level: int
    instruction: str
    files: Mapping[str, FileEntry] = field(repr=False)
    goal: Goal = field(repr=False)
    steps: tuple[Step, ...] = field(repr=False)

    @property
    def min_turns(self) -> int:
        """Assistant turns of the reference solution, the final answer included."""
        return len(self.steps) + 1
