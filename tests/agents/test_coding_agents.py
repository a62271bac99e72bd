"""Claude Code and Codex against the gateway, unmodified, with the settings `headrace serve` prints.

Runs where HEADRACE_CODING_AGENTS names a folder that has them in node_modules (`-m slow`).
"""

import json
from pathlib import Path

import pytest
from agent_rig import chain, installed, run_program, says, serving, with_path

from headrace.serving import client_settings

AGENTS = installed("HEADRACE_CODING_AGENTS")
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
"""Else a second request, for a title, is under way at the same time."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(AGENTS is None, reason="HEADRACE_CODING_AGENTS names no installation"),
]


async def start(words: str, folder: Path, options: str) -> str:
    """What an agent printed that was started with `words` of a shell and `options` after them."""
    assert AGENTS is not None
    environment = QUIET | with_path(AGENTS / "node_modules" / ".bin")
    command = ["sh", "-c", f"{words} {options}"]
    return await run_program(command, folder=folder, environment=environment)


async def test_claude_code_is_one_conversation(tmp_path: Path) -> None:
    def runs(text: str, *commands: str) -> list[int]:
        calls = (("Bash", {"command": c, "description": "as asked"}) for c in commands)
        return says(text, *calls)

    outputs = [
        runs("I write it.", "echo 12 > answer.txt"),
        runs("I check it.", "cat answer.txt", "wc -l answer.txt"),
        says("It is 12."),
    ]
    async with serving(*outputs) as rig:
        options = "-p 'Write 12 into answer.txt.' --allowedTools Bash --output-format json"
        words = client_settings(rig.url, rig.key, "tiny")["Claude Code"]
        told = json.loads(await start(words, tmp_path, options))
        calls = await rig.calls()
    assert (told["result"], told["is_error"]) == ("It is 12.", False)
    assert (tmp_path / "answer.txt").read_text() == "12\n"
    assert chain(calls) == ["first", None, None]
    assert [list(call.output_ids) for call in calls] == outputs
    assert rig.refused == 0


async def test_codex_is_one_conversation(tmp_path: Path) -> None:
    def runs(text: str, *commands: str) -> list[int]:
        return says(text, *(("exec_command", {"cmd": command}) for command in commands))

    outputs = [
        runs("I write it.", "echo 12 > answer.txt"),
        runs("I check it.", "cat answer.txt", "wc -l answer.txt"),
        says("It is 12."),
    ]
    async with serving(*outputs) as rig:
        options = (
            "--json --skip-git-repo-check -s danger-full-access -c analytics.enabled=false "
            "'Write 12 into answer.txt.'"
        )
        words = client_settings(rig.url, rig.key, "tiny")["Codex"]
        told = await start(words.replace(" codex ", " codex exec "), tmp_path, options)
        calls = await rig.calls()
    items = [event["item"] for event in map(json.loads, told.splitlines()) if "item" in event]
    assert items[-1]["text"] == "It is 12."
    ran = [item for item in items if item["type"] == "command_execution"]
    outcomes = [item["aggregated_output"] for item in ran if item["status"] == "completed"]
    assert sorted(outcomes) == ["", "1 answer.txt\n", "12\n"]  # the last two ran side by side
    assert chain(calls) == ["first", None, None]
    assert [list(call.output_ids) for call in calls] == outputs
    assert rig.refused == 0
