"""Which cores belong to whom, and which engines a recipe gets."""

import json
from pathlib import Path

import pytest

from headrace import engines, system
from headrace.cluster.local import LocalCluster
from headrace.engine.client import ProcessEngine
from headrace.engine.split import SplitEngine
from headrace.errors import UserError
from headrace.recipe import Recipe
from headrace.rollout.replicas.router import Router
from headrace.run import plan

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def recipe(**tables: object) -> Recipe:
    fields = {
        "name": "r",
        "model": {"path": "somewhere"},
        "stages": [{"kind": "agentic_rl", "name": "rl", "updates": 1}],
    }
    return Recipe.model_validate({**fields, **tables})


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "available_cores", lambda: tuple(range(8)))


@pytest.mark.parametrize(
    ("cluster", "prefill_cores", "engine", "prefill", "trainer"),
    [
        ({}, 0, (0, 1, 2, 3), (), (4, 5, 6, 7)),
        ({}, 1, (0, 1, 2), (3,), (4, 5, 6, 7)),
        ({}, 3, (0,), (1, 2, 3), (4, 5, 6, 7)),
        ({"engine_cores": [6, 2]}, 1, (6,), (2,), (4, 5, 6, 7)),
        ({"engine_cores": [0, 1], "trainer_cores": [5]}, 1, (0,), (1,), (5,)),
    ],
)
def test_prompts_take_the_last_of_the_engines_cores(
    cluster: dict[str, object],
    prefill_cores: int,
    engine: tuple[int, ...],
    prefill: tuple[int, ...],
    trainer: tuple[int, ...],
) -> None:
    wanted = recipe(cluster=cluster, engine={"prefill_cores": prefill_cores})
    assert system.placement(wanted) == engines.Placement(engine, trainer, tuple(range(8)), prefill)


@pytest.mark.parametrize(
    ("cluster", "prefill_cores", "message"),
    [
        ({}, 4, r"engine.prefill_cores 4: the engine has 4 in all \(0, 1, 2, 3\) .* lower it"),
        ({"engine_cores": [3]}, 1, r"prefill_cores 1: the engine has 1 .*name more in cluster"),
        ({"engine_cores": [3, 9]}, 1, "cluster.engine_cores: core 9 is not available"),
    ],
)
def test_cores_that_cannot_be_divided_are_the_users_error(
    cluster: dict[str, object], prefill_cores: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        system.placement(recipe(cluster=cluster, engine={"prefill_cores": prefill_cores}))


def new_policy(wanted: Recipe, folder: Path) -> ProcessEngine | SplitEngine | Router:
    return engines.new_policy(
        wanted,
        system.placement(wanted),
        cluster=LocalCluster(),
        checkpoint=folder,
        version=3,
        log_dir=folder,
    )


async def test_a_recipe_gets_one_engine_or_two(tmp_path: Path) -> None:
    one, two = (
        new_policy(recipe(engine={"prefill_cores": cores, "max_context": 333}), tmp_path)
        for cores in (0, 1)
    )
    assert isinstance(one, ProcessEngine)
    assert isinstance(two, SplitEngine)
    assert one.max_context == two.max_context == 333
    assert two.weight_version == 3
    prefill, decode = two._prefill, two._decode
    assert isinstance(prefill, ProcessEngine)
    assert isinstance(decode, ProcessEngine)
    assert (prefill._cores, prefill._threads) == ((3,), 1)
    assert (decode._cores, decode._threads) == ((0, 1, 2), 3)
    assert prefill._config.engine_id != decode._config.engine_id == one._config.engine_id
    folder = two._files.folder
    await two.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("cores", "replicas", "shares", "words"),
    [
        (4, 2, ((0, 1), (2, 3)), "2 engine replicas on cores 0, 1 | 2, 3"),
        (3, 2, ((0, 1), (2,)), "2 engine replicas on cores 0, 1 | 2"),
        (2, 3, ((0,), (1,), (0,)), "3 engine replicas share cores 0, 1, one thread each: fewer"),
        (1, 2, ((0,), (0,)), "2 engine replicas share core 0, one thread each: fewer cores"),
    ],
)
def test_replicas_divide_the_engines_cores_or_share_them(
    cores: int, replicas: int, shares: object, words: str
) -> None:
    wanted = recipe(cluster={"engine_cores": list(range(cores))}, engine={"replicas": replicas})
    placed = system.placement(wanted)
    assert placed.shares() == shares
    assert not set(placed.trainer) & set(placed.engine)
    assert engines.engine_words(placed).startswith(words)


def test_a_plan_says_where_models_run_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = str(tmp_path)
    fields = {"model": {"path": path}, "engine": {"replicas": 2}}
    wanted = recipe(**fields, models={"judge": {"path": path}, "own": {"path": path, "cores": [7]}})
    lines = plan(wanted)
    assert "2 engine replicas on cores 0, 1 | 2, 3, trainer on cores 4, 5, 6, 7" in lines
    assert f"model judge: {path} on cores 0, 1, 2, 3 (the engine's)" in lines
    assert f"model own: {path} on cores 7" in lines
    with pytest.raises(UserError, match=r"models.judge.path nowhere: no such directory"):
        plan(recipe(model={"path": path}, models={"judge": {"path": "nowhere"}}))
    with pytest.raises(UserError, match=r"models.judge.cores: core 9 is not available here"):
        plan(recipe(model={"path": path}, models={"judge": {"path": path, "cores": [9]}}))
