"""An environment of the `verifiers` package against the gateway, evaluated by its own command.

Runs where HEADRACE_VERIFIERS_PYTHON names an interpreter that has it, and uv beside it (`-m slow`).
"""

import json
from pathlib import Path

import pytest
from agent_rig import chain, installed, run_program, says, serving, with_path

PYTHON = installed("HEADRACE_VERIFIERS_PYTHON")
HERE = Path(__file__).parent
COUNT = ("bash", {"command": "wc -l < notes.txt"})

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="HEADRACE_VERIFIERS_PYTHON names no installation"),
]


async def test_an_evaluation_is_one_conversation_a_task(tmp_path: Path) -> None:
    """Its agent has a shell; the answer to the second task is wrong, and its reward says so."""
    assert PYTHON is not None
    outputs = [
        says("I count.", COUNT),
        says("It has 3."),
        says("I count.", COUNT),
        says("It has 12."),
    ]
    async with serving(*outputs) as rig:
        command = [PYTHON.with_name("vf-eval"), "counting_lines", "-m", "tiny"]
        options = {
            "--client.base-url": rig.url,
            "--client.api-key-var": "OPENAI_API_KEY",
            "--env.agent.runtime.type": "subprocess",
            "--max-concurrent": "1",
            "--output-dir": "out",
            "--run.name": "run",
        }
        await run_program(
            [*command, *(word for pair in options.items() for word in pair), "--no-push"],
            folder=tmp_path,
            environment={
                "OPENAI_API_KEY": rig.key,
                **with_path(PYTHON.parent),
                "PYTHONPATH": str(HERE),
                "UV_CACHE_DIR": str(PYTHON.parents[1] / "uv-cache"),
            },
        )
        calls = await rig.calls()
    lines = (tmp_path / "out" / "run" / "traces.jsonl").read_text().splitlines()
    traces = [trace for line in lines for trace in json.loads(line)["traces"]]
    assert [trace["errors"] for trace in traces] == [[], []]
    assert [trace["rewards"]["right"]["score"] for trace in traces] == [1.0, 0.0]
    results = [n["message"]["content"] for t in traces for n in t["nodes"] if not n["sampled"]]
    assert [text.strip() for text in results if text.strip().isdigit()] == ["3", "5"]
    # Both tasks were given one key. The second begins with the system prompt of the first.
    assert chain(calls) == ["first", None, "history_rewritten", None]
    assert [list(call.output_ids) for call in calls] == outputs
    assert rig.refused == 0
