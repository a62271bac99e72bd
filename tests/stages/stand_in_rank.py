"""One rank of a trainer without a model; a module of its own because importing it must be quick."""

import os
import signal
from typing import Any


class Rank:
    """Runs in a process of its own; knows two ways to fail and one to hang."""

    def __init__(self, connection: Any, threads: int) -> None:
        self.connection = connection
        self.rank = -1

    def run(self) -> None:
        while not self.connection.closed:
            request = self.connection.poll(0.2)
            if request is None:
                continue
            if request.method == "join":
                self.rank = request.payload["rank"]
            elif request.method == "fail" and self.rank == request.payload["rank"]:
                self.connection.fail(request.id, "user_error", f"rank {self.rank} says no")
                continue
            elif request.method == "die" and self.rank == request.payload["rank"]:
                os.kill(os.getpid(), signal.SIGKILL)
            elif request.method in ("fail", "die"):
                # As in a collective operation that the failed rank never joins.
                signal.pause()
            self.connection.reply(request.id, [self.rank, os.getpid(), request.payload])
