"""mini-swe-agent against the gateway, unmodified, with the settings that `headrace serve` prints.

Runs where HEADRACE_MINI_SWE_AGENT_PYTHON names an interpreter that has it (`-m slow`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from agent_rig import Rig, chain, installed, run_program, says, serving, with_path

from headrace.serving import client_settings

PYTHON = installed("HEADRACE_MINI_SWE_AGENT_PYTHON")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="HEADRACE_MINI_SWE_AGENT_PYTHON names no installation"
    ),
]


def runs(text: str, *commands: str) -> list[int]:
    return says(text, *(("bash", {"command": command}) for command in commands))


async def solve(rig: Rig, folder: Path) -> dict[str, Any]:
    """What the agent wrote down of its attempt in `folder`."""
    assert PYTHON is not None
    (folder / "notes.txt").write_text("one\ntwo\n")
    task = "Write the number of lines of notes.txt into answer.txt."
    words = client_settings(rig.url, rig.key, "tiny")["mini-swe-agent"]
    options = f"--yolo --exit-immediately -o trajectory.json -t '{task}'"
    environment = {
        **with_path(PYTHON.parent),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from a server
    }
    await run_program(["sh", "-c", f"{words} {options}"], folder=folder, environment=environment)
    return json.loads((folder / "trajectory.json").read_text())


async def test_an_attempt_is_one_conversation(tmp_path: Path) -> None:
    outputs = [
        runs("I look.", "ls", "wc -l < notes.txt"),
        runs("I write it.", "wc -l < notes.txt > answer.txt"),
        runs("Done.", SUBMIT),
    ]
    async with serving(*outputs) as rig:
        told = await solve(rig, tmp_path)
        calls = await rig.calls()
    assert told["info"]["exit_status"] == "Submitted"
    assert told["info"]["submission"].strip() == "2"
    assert (tmp_path / "answer.txt").read_text().strip() == "2"
    results = [json.loads(m["content"]) for m in told["messages"] if m["role"] == "tool"]
    assert [result["output"] for result in results[:2]] == ["notes.txt\n", "2\n"]
    assert chain(calls) == ["first", None, None]
    assert [list(call.output_ids) for call in calls] == outputs
    assert rig.refused == 0


async def test_an_answer_that_the_agent_leaves_out_is_a_fork(tmp_path: Path) -> None:
    """It tells the model that a tool call is missing, and not what the model had said."""
    outputs = [
        says("There are 2 lines."),
        runs("I write it.", "echo 2 > answer.txt"),
        runs("", SUBMIT),
    ]
    async with serving(*outputs) as rig:
        told = await solve(rig, tmp_path)
        calls = await rig.calls()
    assert told["info"]["exit_status"] == "Submitted"
    assert chain(calls) == ["first", "history_rewritten", None]
    assert rig.refused == 0
