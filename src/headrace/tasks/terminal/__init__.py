"""Real shell tasks in real files: procedural problems, an agent loop and a hidden verifier."""

from headrace.tasks.terminal.families import FAMILIES
from headrace.tasks.terminal.seeds import evaluation_seed, train_seed
from headrace.tasks.terminal.service import Latency, TerminalOptions, TerminalTasks

__all__ = [
    "FAMILIES",
    "Latency",
    "TerminalOptions",
    "TerminalTasks",
    "evaluation_seed",
    "train_seed",
]
