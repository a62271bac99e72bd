"""Problems from seeds, with training and evaluation apart by construction.

Even seeds train, odd seeds evaluate, and a problem's content decides which side may use it: a draw
whose content belongs to the other side is thrown away and drawn again. So two seeds that give the
same question, as they often do in small families, are always on the same side. Problems are made
by a worker process; this module knows seeds and sides.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.tasks.reasoning.families import Family
from headrace.tasks.reasoning.process import WorkerLost, WorkerProcess

_EVALUATION_SHARE = 4
"""One content in this many belongs to evaluation."""
_MAX_DRAWS = 400
_MAKE_S = 120.0
_KEPT = 4096


class Problem(msgspec.Struct, frozen=True):
    """One problem.

    Attributes:
        family: name of its family.
        position: of the family among the task's.
        item_seed: what the family generated it from.
        question: what the agent is asked.
        answer: one right answer; None where the family only checks answers.
        facts: what the family says about it.
    """

    family: str
    position: int
    item_seed: int
    question: str
    answer: str | None
    facts: dict[str, Any]

    @property
    def content_id(self) -> str:
        """Hex digest of question and answer; white space does not count."""
        text = "\0".join(" ".join(part.split()) for part in (self.question, self.answer or ""))
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def train_seed(index: int) -> int:
    """The `index`-th training seed."""
    return 2 * _checked(index, "index")


def evaluation_seed(index: int) -> int:
    """The `index`-th evaluation seed. No training seed has the same seed or the same content."""
    return 2 * _checked(index, "index") + 1


def family_of(seed: int, families: Sequence[Family]) -> Family:
    """The family of a seed, drawn by weight."""
    _checked(seed, "seed")
    weights = [family.weight for family in families]
    return Random(f"reasoning family {seed}").choices(families, weights)[0]


class Problems:
    """Makes problems. Blocking, and safe to use from several threads.

    Args:
        families: the task's.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = {family.name: i for i, family in enumerate(families)}
        self._worker = WorkerProcess([(f.name, dict(f.settings)) for f in families])
        self._kept: OrderedDict[tuple[int, str], Problem] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, seed: int, family: str) -> Problem:
        """The problem of a seed in a family: a pure function of both and of the settings.

        Raises:
            UserError: the family gives no such problem, or its settings allow too few.
            WorkerLost: the process that makes problems died or hangs.
        """
        with self._lock:
            found = self._kept.get((seed, family))
        if found is None:
            found = self._make(seed, family)
            with self._lock:
                self._kept[(seed, family)] = found
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return found

    def close(self) -> None:
        """End the worker. Safe to repeat."""
        self._worker.close()

    def _make(self, seed: int, family: str) -> Problem:
        trouble = ""
        position = self._families[family]
        for draw in range(_MAX_DRAWS):
            digest = hashlib.blake2b(f"{seed} {family} {draw}".encode(), digest_size=4).digest()
            item_seed = int.from_bytes(digest, "big") >> 1
            try:
                made = self._worker.ask({"family": position, "seed": item_seed}, _MAKE_S)
            except WorkerLost as lost:
                raise WorkerLost(f"making problems of {family}: {lost}") from lost
            if "error" in made:
                trouble = f"; a draw failed with {made['error']}"
                continue
            problem = Problem(
                family, position, item_seed, made["question"], made["answer"], made["facts"]
            )
            if belongs_to_evaluation(problem.content_id) == (seed % 2 == 1):
                return problem
        side = "evaluation" if seed % 2 else "training"
        raise UserError(
            f"tasks.reasoning.families.{family}: none of {_MAX_DRAWS} draws is a problem for {side}"
            f"{trouble}; choose settings that allow more different questions"
        )


def belongs_to_evaluation(content_id: str) -> bool:
    """Whether evaluation, and not training, may use a content."""
    return int(content_id[:8], 16) % _EVALUATION_SHARE == 0


def _checked(number: int, field: str) -> int:
    if number < 0:
        raise UserError(f"reasoning tasks: {field} is {number}; use 0 or more")
    return number
