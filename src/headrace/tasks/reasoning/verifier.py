"""Scores answers with their family's own scorer, in a process that can be stopped.

Whatever an answer does to a scorer (an exception, an endless simplification, a crash) is the
answer's fault and scores nothing; only a worker that cannot be started is the environment's.
"""

import re

import msgspec

from headrace.tasks.reasoning.problems import Problem
from headrace.tasks.reasoning.process import WorkerLost, WorkerProcess
from headrace.tasks.reasoning.screen import refusal

_MOST_CHARS = 20_000
_PREPARE_S = 120.0
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Verdict(msgspec.Struct, frozen=True):
    """What a scorer says.

    Attributes:
        score: in [0, 1].
        reason: why it is not 1, where more is known than that; for people.
    """

    score: float
    reason: str = ""


def find_answer(message: str) -> str | None:
    """What stands in the last pair of answer tags, without white space at the edges; or None."""
    found = _ANSWER.findall(message)
    return found[-1].strip() if found else None


class Verifier:
    """Blocking, and safe to use from several threads; answers are scored one after the other.

    Args:
        worker: that knows the task's families; not the one that makes problems, so that an answer
            which must be stopped stops nothing else.
        limit_s: seconds a scorer may take.
    """

    def __init__(self, worker: WorkerProcess, limit_s: float) -> None:
        self._worker = worker
        self._limit_s = limit_s

    def score(self, problem: Problem, answer: str) -> Verdict:
        """Score an answer.

        Raises:
            WorkerLost: the scoring process cannot be started, or not make the problem again.
        """
        if len(answer) > _MOST_CHARS:
            return Verdict(0.0, f"the answer is longer than {_MOST_CHARS} characters")
        if (reason := refusal(problem.family, answer)) is not None:
            return Verdict(0.0, reason)
        request = {"family": problem.position, "seed": problem.item_seed}
        # First the problem alone: making it must not use up the answer's time.
        self._worker.ask(request, _PREPARE_S)
        try:
            said = self._worker.ask({**request, "score": answer}, self._limit_s)
        except WorkerLost as lost:
            return Verdict(0.0, f"the scorer gave up on this answer: {lost}")
        if "error" in said:
            raise WorkerLost(f"scoring {problem.family}: {said['error']}")
        return Verdict(said["score"], said.get("refused", ""))

    def close(self) -> None:
        """End the scoring process. Safe to repeat."""
        self._worker.close()
