"""The pipe between a benchmark and a peer: one JSON object per line, a request, then its answer.

Runs under a peer's own Python, so it needs nothing but the standard library. What libraries print
goes to standard error. A peer ends when its standard input does, or when its parent dies, even if
it is stopped at that moment.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1


def options() -> Any:
    """The peer's only argument, a JSON object; to be called first.

    Standard output is kept for answers: what is printed from here on goes to standard error.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    found = json.loads(sys.argv[1])
    found["answers"] = answers
    return found


def serve(given: Any, methods: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Say that the peer is ready, then answer {"method": name, ...arguments} until the end.

    An exception is answered as {"error": text}; the peer goes on.
    """
    with os.fdopen(given["answers"], "w", encoding="utf-8") as answers:
        print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = methods[request.pop("method")](**request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


def waves(prompts: Sequence[list[int]], concurrency: int) -> Iterator[list[list[int]]]:
    """The prompts, `concurrency` at a time."""
    for first in range(0, len(prompts), concurrency):
        yield list(prompts[first : first + concurrency])


def expect(found: int, wanted: int) -> None:
    """Tokens sampled must be those asked for, or a measurement is of something else.

    Raises:
        RuntimeError: they are not.
    """
    if found != wanted:
        raise RuntimeError(f"sampled {found} tokens, not {wanted}")
