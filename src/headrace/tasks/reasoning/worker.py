"""The process in which problems of reasoning-gym are generated and answers are scored.

A program of its own, for two reasons. Some generators walk over sets of strings, whose order Python
draws anew in every process unless it is started with a fixed hash seed; and some scorers hand the
model's text to an interpreter or to a solver, which must be stoppable. It reads one JSON request
per line and writes one JSON answer per line; it knows families and seeds, nothing of models.
"""

import contextlib
import dataclasses
import json
import math
import os
import random
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any

_KEPT_ENTRIES = 64
_MEMORY_BYTES = 4 << 30
_MOST_FACT_CHARS = 4000


def dataset(name: str, settings: dict[str, Any], seed: int) -> Any:
    """The one-item dataset of a family at `seed`, with `settings` for its configuration.

    Lists become tuples where the family's own default is one, as TOML and JSON have no tuples.

    Raises:
        Exception: whatever the family's own checks raise.
    """
    from reasoning_gym.factory import DATASETS

    made, configuration = DATASETS[name]
    defaults = {f.name: f.default for f in dataclasses.fields(configuration)}
    fitted = {
        key: tuple(value)
        if isinstance(value, list) and isinstance(defaults.get(key), tuple)
        else value
        for key, value in settings.items()
    }
    config = configuration(**fitted, seed=seed, size=1)
    if hasattr(config, "validate"):
        config.validate()
    return made(config)


def facts_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of an entry's metadata, leaving out what is long."""
    facts = {}
    for key, value in entry["metadata"].items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            continue
        if len(text) <= _MOST_FACT_CHARS:
            facts[key] = value
    return facts


class Worker:
    """Answers requests about the families it was started with."""

    def __init__(self, families: list[tuple[str, dict[str, Any]]]) -> None:
        self._families = families
        self._entries: OrderedDict[tuple[int, int], tuple[Any, dict[str, Any]]] = OrderedDict()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request; what a family raises is part of it."""
        try:
            made, entry = self._entry(request["family"], request["seed"])
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        if "score" not in request:
            known = entry["answer"]
            return {
                "question": str(entry["question"]),
                "answer": None if known is None else str(known),
                "facts": facts_of(entry),
            }
        try:
            score = float(made.score_answer(request["score"], entry))
        except Exception as error:
            # Scorers meet text that their authors did not think of; it is wrong, whatever it is.
            return {"score": 0.0, "refused": f"{type(error).__name__}: {str(error)[:100]}"}
        return {"score": min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0}

    def _entry(self, family: int, seed: int) -> tuple[Any, dict[str, Any]]:
        key = (family, seed)
        found = self._entries.pop(key, None)
        if found is None:
            import numpy

            # A generator that draws from the global sources is a function of its seed, too.
            random.seed(seed)
            numpy.random.seed(seed)
            name, settings = self._families[family]
            made = dataset(name, settings, seed)
            found = (made, made[0])
            if len(self._entries) >= _KEPT_ENTRIES:
                self._entries.popitem(last=False)
        self._entries[key] = found
        return found


def main() -> None:
    """Serve until the input ends. The first line of input names the families."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Families and their libraries print; answers go where nobody else writes.
    out = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    requests = sys.stdin.buffer

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    start = json.loads(requests.readline())
    try:
        import reasoning_gym  # noqa: F401 -- seconds, once
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    worker = Worker([(name, settings) for name, settings in start["families"]])
    say({"ready": True})
    for line in requests:
        request = json.loads(line)
        # Whoever asked may be gone before a scorer ends; SIGALRM's default action ends this.
        signal.alarm(math.ceil(request["limit_s"]) + 1)
        message = worker.answer(request)
        signal.alarm(0)
        say(message)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
