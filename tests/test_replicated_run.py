"""A whole run over two replicas with a judge beside them: one replica is killed in the middle of
the RL stage, and the run ends as if nothing had been."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from headrace import run as run_module
from headrace import system as system_module
from headrace.engine.scoring import score_tokens
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.replicas.router import Router
from headrace.rollout.segments import segments
from headrace.rollout.types import DropReason, Outcome
from headrace.run import run_recipe
from headrace.system import System
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from small_runs import ChatTask, logged, small_checkpoint, small_recipe, use_tasks

KILLED_AT, LIMITED_AT = 10, 14
"""Rollouts, by number, that harm: the one kills a replica, the other asks for too much."""


class Chat(ChatTask):
    """Two turns with the model, one with the judge; rewards alternate, so that there is signal."""

    def __init__(self) -> None:
        self.system: System | None = None
        self.rollouts = 0
        self.killed = 0
        self.back = asyncio.Event()

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        self.rollouts += 1
        number = self.rollouts
        if number > KILLED_AT + 8:  # those at work when it happens go on without it
            await asyncio.wait_for(self.back.wait(), 180.0)
        assert endpoint.models == ("judge",)
        assert endpoint.base_url.startswith("http://localhost:")
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

            async def ask(model: str, messages: list[Any]) -> Any:
                answer = await client.chat.completions.create(
                    model=model, messages=messages, max_tokens=8
                )
                assert answer.model == model
                return answer.choices[0].message

            messages: list[Any] = [{"role": "user", "content": f"hello {number}"}]
            for turn in range(2 if number != LIMITED_AT else 9):
                if number == KILLED_AT and turn:
                    self.kill()
                said = await ask(endpoint.model, messages)
                messages += [
                    {"role": "assistant", "content": said.content},
                    {"role": "user", "content": "go on"},
                ]
            # The very messages the model read: were histories mixed, this would continue them.
            await ask("judge", messages[:1])
            with pytest.raises(NotFoundError, match="use one of replicated, judge"):
                await ask("teacher", messages)
        return RolloutResult(Outcome.OK, {"reward": float(number % 2)})

    def report(self, words: str) -> None:
        if "serves again" in words:
            self.back.set()

    def kill(self) -> None:
        assert self.system is not None
        engine = self.system.engine
        assert isinstance(engine, Router)
        busiest = max(engine.replicas(), key=lambda replica: replica["requests"])
        os.kill(busiest["pid"], signal.SIGKILL)
        self.killed += 1


def test_a_run_outlives_a_killed_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Chat()

    @contextlib.asynccontextmanager
    async def open_system(recipe: Any, **options: Any) -> AsyncIterator[System]:
        options["report"] = task.report
        async with system_module.open_system(recipe, **options) as opened:
            task.system = opened
            yield opened
            scores = await score_tokens(opened.models["judge"].engine, [5, 6, 7, 8])
            assert len(scores.logprobs) == 3

    monkeypatch.setattr(run_module, "open_system", open_system)
    use_tasks(monkeypatch.setattr, {"chat": task})
    checkpoint = small_checkpoint(tmp_path / "model")
    recipe = small_recipe(
        checkpoint,
        {
            "kind": "agentic_rl",
            "name": "rl",
            "task": "chat",
            "updates": 4,
            "group_size": 4,
            "groups_per_batch": 2,
            "concurrency": 8,
            "evaluate": False,
        },
        name="replicated",
        engine={"replicas": 2, "max_running": 8, "max_context": 128},
        models={"judge": {"path": str(checkpoint), "renderer": "compact"}},
        session={"calls": 4, "sampled_tokens": 64},
        gateway={"address": "localhost"},
    )
    run_dir = tmp_path / "run"
    assert run_recipe(recipe, run_dir, resume=False, no_isolation=True) == 0

    assert task.killed == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert set(summary["laws"].values()) == {"held"}
    last = logged(run_dir, "rl")[-1]
    assert last["replica_restarts"] == 1
    assert {last[f"replica.engine-{i}.restarts"] for i in range(2)} == {0, 1}
    with Ledger.resume(run_dir) as ledger:
        assert all(finding.held for finding in audit(ledger, derive=segments).values())
        account = ledger.conservation("rl")
        assert account.closes
        assert account.trained > 0
        assert account.dropped[DropReason.OTHER_MODEL] > 0
        sessions = [ledger.session(s.id) for s in ledger.sessions(stage="rl")]
        summaries = {s.id: s for s in ledger.sessions(stage="rl")}
    assert not [s for s in sessions if s.outcome is Outcome.ENV_FAILED], "replicas, not tasks, fail"
    limited = [s for s in sessions if s.outcome is Outcome.AGENT_FAILED]
    assert [s.reason[:34] for s in limited] == ["session limit (session_call_limit)"]
    assert len(limited[0].policy_calls) == 4
    done = next(s for s in sessions if s.outcome is Outcome.OK)
    said = {call.id: call for call in done.calls}
    (judged,) = [call for call in done.calls if call.model == "judge"]
    assert judged.parent_id is None
    assert judged.fork_reason is None, "it continues nothing of the policy's, nor forks from it"
    assert {span.weight_version for span in judged.spans} == {0}
    assert {span.engine_id for span in judged.spans} == {"judge"}
    assert [call.index for call in done.calls] == [0, 1, 2]
    assert [said[call.parent_id].model for call in done.calls if call.parent_id] == [None]
    trained = [s for s in sessions if summaries[s.id].step is not None]
    assert {s.engine_id for t in trained for c in t.policy_calls for s in c.spans} == {
        "engine-0",
        "engine-1",
    }
