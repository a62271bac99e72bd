"""Scores the end of a terminal rollout against its hidden goal.

Pure functions: they see the agent's final message and the final work folder, never the commands.
Exact about content, lenient about white space at the edges and quotes around an answer.
"""

from collections.abc import Mapping

from headrace.sandbox.types import FileEntry
from headrace.tasks.terminal.problem import AnswerGoal, Goal, StateGoal

_QUOTES = "`'\""


def score(goal: Goal, answer: str, tree: Mapping[str, FileEntry] | None) -> dict[str, float]:
    """Reward components of a finished rollout, each 0.0 or 1.0.

    Args:
        goal: what was wanted.
        answer: the agent's final message.
        tree: the final work folder; needed for a `StateGoal` only.

    Returns:
        "reward" and beside it the component it came from: "answer" or "state".
    """
    if isinstance(goal, AnswerGoal):
        value = float(answer_matches(goal, answer))
        return {"reward": value, "answer": value}
    if tree is None:
        raise ValueError("a state goal is scored on a tree")
    value = float(state_difference(goal, tree) is None)
    return {"reward": value, "state": value}


def answer_matches(goal: AnswerGoal, answer: str) -> bool:
    """Whether the final message is the expected line.

    White space runs count as one space; a pair of quotes around and one full stop after the
    answer are dropped. Anything else around it makes it wrong.
    """
    text = " ".join(answer.split())
    if text != goal.expected:
        text = text.removesuffix(".").strip()
    if len(text) > 2 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1].strip()
    if goal.is_path:
        text = text.removeprefix("./")
    return text == goal.expected


def state_difference(goal: StateGoal, tree: Mapping[str, FileEntry]) -> str | None:
    """One line on the first difference from the wanted work folder, or None if there is none.

    Content is compared up to a missing or additional newline at the end, folders by presence only.
    """
    for path in sorted(goal.tree.keys() | tree.keys()):
        want, have = goal.tree.get(path), tree.get(path)
        if want is None:
            return f"{path} should not exist"
        if have is None:
            return f"{path} is missing"
        if want.kind != have.kind:
            return f"{path} is a {have.kind}, not a {want.kind}"
        if want.kind == "dir":
            continue
        if want.data.rstrip(b"\n") != have.data.rstrip(b"\n"):
            return f"{path} has other content"
        if path not in goal.any_mode and want.mode != have.mode:
            return f"{path} has mode {have.mode:o}, not {want.mode:o}"
    return None
