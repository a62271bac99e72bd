"""An environment of the `verifiers` package: tasks, their reward, and a file for each to work on.

Runs inside that package's installation, not headrace's: `vf-eval counting_lines`.
"""

import verifiers.v1 as vf  # type: ignore[import-not-found] # installed elsewhere

__all__ = ["CountingLines"]


class Lines(vf.TaskData):
    """A task's data.

    Attributes:
        lines: of its file.
    """

    lines: int


class CountLines(vf.Task[Lines]):
    """Say how many lines notes.txt has."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("notes.txt", b"a line\n" * self.data.lines)

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.lines) in trace.last_reply)


class CountingLines(vf.Taskset[CountLines, vf.TasksetConfig]):
    """Two tasks."""

    def load(self) -> list[CountLines]:
        return [
            CountLines(
                Lines(prompt=f"How many lines has notes.txt? ({n})", lines=n), self.config.task
            )
            for n in (3, 5)
        ]
