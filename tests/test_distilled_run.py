"""A whole run that ends with on-policy distillation from two teachers, one for each task."""

import math
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.recipe import AgenticRlStage
from headrace.rollout.groups import ScoredRollout, judged
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.segments import segments
from headrace.rollout.types import DropReason, Outcome
from headrace.run import run_recipe
from headrace.stages.checks import check_recipe
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance
from headrace.training.rl import teacher_names, teacher_numbers
from small_runs import ChatTask, ask, logged, small_checkpoint, small_recipe, use_tasks


class Talk(ChatTask):
    """One answer to a greeting, worth nothing: no reward ever differs from another."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        await ask(endpoint, f"{self.name} {instance.seed}", max_tokens=24)
        return RolloutResult(Outcome.OK, {"reward": 0.0})


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

    use_tasks(monkeypatch.setattr, tasks)
    teachers = {
        name: str(small_checkpoint(tmp_path / name, seed=1 + i, sharp=True))
        for i, name in enumerate(tasks)
    }
    recipe = small_recipe(small_checkpoint(tmp_path / "student"), table({"teachers": teachers}))
    run_dir = tmp_path / "run"
    assert run_recipe(recipe, run_dir, resume=False, no_isolation=True) == 0

    distance = [row["kl_teacher"] for row in logged(run_dir, "distil")]
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
    warmup = {"kind": "sft", "name": "warmup", "steps": 1}
    recipe = small_recipe(
        small_checkpoint(tmp_path / "student"), warmup, table({"teacher": "warmip"})
    )
    with pytest.raises(UserError, match=r'teacher "warmip" is neither .*did you mean "warmup"'):
        check_recipe(recipe)
