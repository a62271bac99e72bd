"""Metrics go where the recipe says; Weights & Biases is optional and never ends a run."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.observe.metrics import BoardSink, MetricsWriter, read_metrics
from headrace.observe.sinks import WandbSink, open_sinks
from headrace.recipe import Recipe

RECIPE = {
    "name": "r",
    "model": {"path": "m"},
    "stages": [{"kind": "agentic_rl", "name": "rl", "updates": 1}],
}


class FakeWandb(types.ModuleType):
    """What this project uses of the package, written down."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.finished = 0
        self.failure: Exception | None = None

    def init(self, **options: Any) -> "FakeWandb":
        if self.failure is not None:
            raise self.failure
        self.started.append(options)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        if self.failure is not None:
            raise self.failure
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def recipe(**observe: Any) -> Recipe:
    return Recipe.model_validate({**RECIPE, "observe": observe})


def test_one_line_of_the_recipe_chooses(tmp_path: Path, wandb: FakeWandb) -> None:
    assert [type(s) for s in open_sinks(Recipe.model_validate(RECIPE), tmp_path)] == [BoardSink]
    assert open_sinks(recipe(tensorboard=False), tmp_path) == []
    both = open_sinks(recipe(wandb="agents"), tmp_path)
    assert [type(s) for s in both] == [WandbSink, BoardSink]
    (options,) = wandb.started
    assert options["project"] == "agents"
    assert options["config"]["stages"][0]["name"] == "rl"
    assert "mode" not in options, "WANDB_MODE decides whether anything leaves the machine"
    for sink in both:
        sink.close()


def test_rows_arrive_with_the_steps_of_their_stage(tmp_path: Path, wandb: FakeWandb) -> None:
    with MetricsWriter(tmp_path, sinks=[WandbSink(tmp_path, {}, "p")]) as writer:
        writer.log("sft", 90, {"loss": 2.0, "bad": float("nan")})
        writer.log("rl", 1, {"reward_mean": 0.5})
    assert not (tmp_path / "tensorboard").exists()
    assert [{k: v for k, v in row.items() if k != "time"} for row in wandb.rows] == [
        {"sft/loss": 2.0, "sft/step": 90},
        {"rl/reward_mean": 0.5, "rl/step": 1},
    ]
    assert ("rl/*", "rl/step") in wandb.axes
    assert wandb.finished == 1


def test_a_resumed_run_continues_its_own(tmp_path: Path, wandb: FakeWandb) -> None:
    for _ in range(2):
        WandbSink(tmp_path, {}, "p").close()
    first, second = wandb.started
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"


def test_without_the_package_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r'observe.wandb "p".*pip install "headrace\[wandb\]"'):
        WandbSink(tmp_path, {}, "p")


def test_a_failing_start_names_the_ways_out(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.failure = RuntimeError("no API key")
    with pytest.raises(UserError, match=r"no API key.*WANDB_MODE=offline"):
        WandbSink(tmp_path, {}, "p")


def test_a_service_that_fails_later_does_not_end_the_run(
    tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsWriter(tmp_path, sinks=[WandbSink(tmp_path, {}, "p")]) as writer:
        wandb.failure = RuntimeError("gone")
        for step in range(3):
            writer.log("rl", step, {"loss": 1.0})
    assert len(read_metrics(tmp_path)) == 3
    assert caplog.text.count("no more metrics go there") == 1
