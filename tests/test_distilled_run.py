"""A whole run that ends with on-policy distillation from two teachers, one for each task."""

import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from headrace import run as run_module
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.recipe import AgenticRlStage, parse_recipe
from headrace.rollout.audit import audit
from headrace.rollout.groups import ScoredRollout, judged
from headrace.rollout.ledger import Ledger
from headrace.rollout.segments import segments
from headrace.rollout.types import DropReason, Outcome
from headrace.run import run_recipe
from headrace.stages.checks import check_recipe
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from headrace.tokens.training import train_tokenizer
from headrace.training.rl import teacher_names, teacher_numbers


class Talk:
    """One answer to a greeting, worth nothing: no reward ever differs from another."""

    def __init__(self, name: str) -> None:
        self.name = name

    def instance(self, seed: int) -> TaskInstance:
        return TaskInstance(self.name, seed, "talk", 1, 1)

    def train_seed(self, index: int) -> int:
        return index

    def evaluation_seed(self, index: int) -> int:
        return -1 - index

    def content_id(self, instance: TaskInstance) -> str:
        return str(instance.seed)

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": f"{self.name} {instance.seed}"}],
                max_tokens=24,
            )
        return RolloutResult(Outcome.OK, {"reward": 0.0})


def checkpoint(path: Path, seed: int, *, sharp: bool = False) -> Path:
    config = ModelConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=256,
        tie_embeddings=True,
    )
    model = Decoder(config)
    model.init_weights(seed)
    if sharp:  # else two new models hardly differ, both say anything
        with torch.no_grad():
            model.get_parameter("embed.weight").mul_(8.0)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    save_checkpoint(model, path)
    train_tokenizer(["hello, go on"] * 20, 400).save(path)
    return path


def table(teachers: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "kind": "agentic_rl",
        "name": "distil",
        "tasks": {"left": 1.0, "right": 1.0},
        "updates": 8,
        "groups_per_batch": 8,
        "concurrency": 8,
        "learning_rate": 1e-2,
        "evaluate": False,
        "objective": {"kind": "distillation", **teachers},
        **other,
    }


def test_a_student_learns_from_a_teacher_for_each_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {name: Talk(name) for name in ("left", "right")}

    @contextlib.asynccontextmanager
    async def open_tasks(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield None, tasks

    monkeypatch.setattr(run_module, "open_tasks", open_tasks)
    monkeypatch.setattr("headrace.tasks.registry.create_task", lambda name, *_: tasks[name])
    teachers = {
        name: str(checkpoint(tmp_path / name, 1 + i, sharp=True)) for i, name in enumerate(tasks)
    }
    recipe = parse_recipe(
        {
            "name": "distilled",
            "model": {"path": str(checkpoint(tmp_path / "student", 0)), "renderer": "compact"},
            "engine": {"max_running": 8, "max_context": 128},
            "measure": {"text_bytes": 0},
            "stages": [table({"teachers": teachers})],
        },
        "test",
    )
    run_dir = tmp_path / "run"
    assert run_recipe(recipe, run_dir, resume=False, no_isolation=True) == 0

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    distance = [row["metrics"]["kl_teacher"] for row in rows if row["stage"] == "distil"]
    assert len(distance) == 8
    # That they come closer is for many more updates to show; here it is judged, and differs.
    assert distance[0] > 0.1
    assert all(math.isfinite(value) for value in distance)
    with Ledger.resume(run_dir) as ledger:
        assert all(finding.held for finding in audit(ledger, derive=segments).values())
        account = ledger.conservation("distil")
        assert account.closes
        assert DropReason.NO_SIGNAL not in account.dropped
        trained = [s for s in ledger.sessions(stage="distil") if s.step is not None]
    assert {s.task for s in trained} == {"left", "right"}
    assert {s.advantage for s in trained} == {0.0}


def test_every_valid_rollout_trains_under_a_teacher() -> None:
    decision = judged(
        [
            ScoredRollout("a", Outcome.OK, 1.0),
            ScoredRollout("b", Outcome.AGENT_FAILED, 1.0),
            ScoredRollout("c", Outcome.ENV_FAILED),
            ScoredRollout("d", Outcome.CANCELLED),
        ]
    )
    assert [(m.session_id, m.advantage, m.multiplicity) for m in decision.members] == [
        ("a", 0.0, 1),
        ("b", 0.0, 1),
    ]
    assert decision.dropped == (("c", DropReason.ENV_FAILED), ("d", DropReason.CANCELLED))
    assert decision.drop_reason is None
    lost = judged([ScoredRollout("c", Outcome.ENV_FAILED)])
    assert lost.drop_reason is DropReason.GROUP_INVALID
    assert lost.dropped == (("c", DropReason.ENV_FAILED),)


def test_teachers_are_numbered_once_each() -> None:
    stage = AgenticRlStage.model_validate(table({"teachers": {"left": "a", "right": "b"}}))
    assert stage.group_size == 1
    assert teacher_names(stage) == ["a", "b"]
    assert teacher_numbers(stage) == {"left": 0, "right": 1}
    shared = AgenticRlStage.model_validate(table({"teacher": "a"}))
    assert teacher_names(shared) == ["a"]
    assert teacher_numbers(shared) == {"left": 0, "right": 0}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (table({}), "give teacher or teachers"),
        (table({"teacher": "a", "teachers": {"left": "b"}}), "give teacher or teachers"),
        (table({"teachers": {"left": "a"}}), "names none for task right"),
        (table({"teachers": {"left": "a", "right": "b", "rigth": "c"}}), 'did you mean "right"'),
        (table({"teacher": "a"}, group_size=4), "group_size is 4"),
        (table({}, objective={"kind": "icepop"}, group_size=1), "nothing to compare"),
    ],
)
def test_mistakes_in_a_distillation_stage_are_explained(
    given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        AgenticRlStage.model_validate(given)


def test_an_unknown_teacher_is_refused_before_anything_starts(tmp_path: Path) -> None:
    student = str(checkpoint(tmp_path / "student", 0))
    warmup = {"kind": "sft", "name": "warmup", "steps": 1}
    recipe = parse_recipe(
        {
            "name": "distilled",
            "model": {"path": student, "renderer": "compact"},
            "engine": {"max_context": 128},
            "stages": [warmup, table({"teacher": "warmip"})],
        },
        "test",
    )
    with pytest.raises(UserError, match=r'teacher "warmip" is neither .*did you mean "warmup"'):
        check_recipe(recipe)
