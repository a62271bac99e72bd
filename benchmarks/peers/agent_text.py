"""What an agent with a shell sends at each turn, as the very bytes of its JSON.

Every turn appends the assistant's answer with its tool call and a tool result, other text in each
session and turn. Standard library only; knows neither HTTP nor who reads it.
"""

import json
import random
from typing import NamedTuple

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the task's machine and return its output.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command line to run."},
                "timeout": {"type": "integer", "description": "Seconds until it is stopped."},
            },
            "required": ["command"],
        },
    },
}
CONTENT = "I will look at the files first."
THOUGHT = "The option must be read somewhere; a search finds where."
"""In the answer; as most clients do, ours does not send it back."""
COMMAND = "grep -rn 'timeout' src | head -20"
ARGUMENTS = json.dumps({"command": COMMAND}, separators=(",", ":"))
CHAT_PATH = "/v1/chat/completions"

_SYSTEM = (
    "You fix bugs in a repository. Work in small steps: look at files, change one thing, run the "
    "tests. Call the tool bash once in every answer until the task is done."
)
_TASK = "The command line tool ignores its --timeout option when it is 0. Find out why and fix it."
_PROSE = (
    "def return import self timeout request session None True value config parse error test line "
    "path read write open close result assert raise with for in if else class"
)
_WORDS = _PROSE.split()
_LINES = 4096
_END = f'],"model":"headrace","max_tokens":64,"tools":[{json.dumps(TOOL)}]}}'.encode()


def _text_lines() -> list[str]:
    """Lines as a search over source files prints them; the same in every process."""
    draw = random.Random(0)
    return [
        f"src/{draw.choice(_WORDS)}_{draw.choice(_WORDS)}.py:{draw.randrange(900)}:"
        f"    {' '.join(draw.choices(_WORDS, k=draw.randint(3, 9)))} = {draw.randrange(10**6)}"
        for _ in range(_LINES)
    ]


class Opening(NamedTuple):
    """The parts of a body that do not change."""

    head: bytes
    end: bytes


class AgentText:
    """Bodies of sessions, by number of session and turn.

    Args:
        lines: of each tool result.
        series: other series have other texts, so that no cache knows them.
    """

    def __init__(self, lines: int, series: int) -> None:
        self._lines = lines
        self._series = series
        self._text = _text_lines()
        first = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _TASK}]
        opening = json.dumps(first, separators=(",", ":"))[:-1]
        self.opening = Opening(f'{{"messages":{opening}'.encode(), _END)

    def result(self, session: int, turn: int) -> str:
        """The tool result that comes before turn `turn` >= 1."""
        start = (session * 7919 + turn * 104_729 + self._series * 1013) % (_LINES - self._lines)
        found = "\n".join(self._text[start : start + self._lines])
        return f"run {self._series}, job {session}, step {turn}\n{found}"

    def added(self, session: int, turn: int) -> bytes:
        """What turn `turn` has after everything that turn `turn` - 1 sent; turn 0 has nothing."""
        if turn == 0:
            return b""
        call = {
            "id": f"call_{turn - 1}_0",
            "type": "function",
            "function": {"name": "bash", "arguments": ARGUMENTS},
        }
        answer = {"role": "assistant", "content": CONTENT, "tool_calls": [call]}
        told = {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": self.result(session, turn),
        }
        pair = json.dumps([answer, told], separators=(",", ":"))
        return f",{pair[1:-1]}".encode()
