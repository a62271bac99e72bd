"""Recipes: every mistake is one line that names the place, the value and the remedy."""

from typing import get_args

import pytest

from headrace.errors import UserError
from headrace.recipe import (
    AgenticRlStage,
    DoubleSidedObjective,
    Objective,
    find_recipe,
    load_recipe,
    parse_recipe,
    share_limits,
    tables_in,
)
from headrace.rollout.choosing.curriculum import CurriculumConfig
from headrace.training.reinforced import RlConfig

MINIMAL = {
    "name": "x",
    "model": {"path": "smollm2-135m-instruct"},
    "stages": [{"kind": "agentic_rl", "name": "rl", "updates": 3}],
}


def with_change(**changes):
    return {**MINIMAL, **changes}


def with_rl(**keys):
    return with_change(stages=[{**MINIMAL["stages"][0], **keys}])


def test_defaults_follow_the_paper():
    stage = parse_recipe(MINIMAL, "t").stages[0]
    assert isinstance(stage, AgenticRlStage)
    assert stage.reset_optimizer
    assert isinstance(stage.objective, DoubleSidedObjective)
    assert (stage.objective.eps_low, stage.objective.eps_high) == (0.2, 0.28)
    assert not stage.divides_by_std
    assert stage.freeze_indexer


def rl_stage(**keys):
    stage = parse_recipe(with_rl(**keys), "t").stages[0]
    assert isinstance(stage, AgenticRlStage)
    return stage


def test_objectives_have_their_own_keys_and_defaults():
    stage = rl_stage(objective={"kind": "icepop"})
    assert (
        stage.objective.model_dump().items() >= {"beta": 2.0, "normalisation": "group_mean"}.items()
    )
    assert stage.divides_by_std
    assert not rl_stage(objective={"kind": "grpo"}, advantage_std=False).divides_by_std


def test_every_objective_is_one_that_the_trainer_knows():
    for table in tables_in(Objective):
        (kind,) = get_args(table.model_fields["kind"].annotation)
        more = {"teacher": "warmup"} if kind == "distillation" else {}
        objective = rl_stage(objective={"kind": kind, **more}).objective
        rl = RlConfig(**objective.model_dump(exclude={"teacher", "teachers"}))
        assert rl.kind == kind
    assert RlConfig() == RlConfig(**DoubleSidedObjective().model_dump())


def test_curriculum_and_bound_are_off_and_on_by_their_tables():
    stage = rl_stage()
    assert stage.curriculum.sampling == "uniform"
    assert (stage.dynamic.max_overgeneration, stage.dynamic.when_exceeded) == (8.0, "shrink")
    stage = rl_stage(curriculum={"start_level": 1}, dynamic={"when_exceeded": "fail"})
    assert (stage.curriculum.sampling, stage.curriculum.window) == ("thompson", (0.1, 0.9))
    assert CurriculumConfig(**stage.curriculum.constants).start_level == 1
    for given in ({}, {"curriculum": {}}, {"curriculum": {"sampling": "uniform"}}):
        recipe = parse_recipe(with_rl(**given), "t")
        assert parse_recipe(recipe.model_dump(mode="json"), "resolved") == recipe


def test_older_recipes_keep_their_meaning():
    stage = rl_stage(eps_low=0.1, eps_high=0.5, advantage_std=False)
    assert stage.objective == DoubleSidedObjective(eps_low=0.1, eps_high=0.5)
    assert rl_stage(objective={"eps_low": 0.1}).objective == DoubleSidedObjective(eps_low=0.1)
    assert (
        parse_recipe(parse_recipe(MINIMAL, "t").model_dump(), "t").stages
        == parse_recipe(MINIMAL, "t").stages
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_change(engin={}), 'unknown key "engin"; did you mean "engine"?'),
        (
            with_change(engine={"max_runing": 3}),
            'unknown key "engine.max_runing"; did you mean "max_running"?',
        ),
        (
            with_change(stages=[{"kind": "agentic_rl", "name": "rl", "update": 3}]),
            'unknown key "stages.rl.update"; did you mean "updates"?',
        ),
        (
            with_change(engine={"max_running": 0}),
            "engine.max_running: .*greater than or equal to 1",
        ),
        (with_change(model={}), "model: give exactly one of path"),
        (
            with_change(model={"init": {"hidden_size": 100, "num_heads": 6}}),
            "hidden_size 100 is not a multiple of num_heads 6",
        ),
        (
            with_change(stages=[{"kind": "rl", "name": "a"}]),
            "kind must be one of pretrain, .*sft, agentic_rl",
        ),
        (
            with_rl(objective={"kind": "icepop", "betta": 3}),
            'unknown key "stages.rl.objective.betta"; did you mean "beta"?',
        ),
        (
            with_rl(objective={"kind": "ice_pop"}),
            "stages.rl.objective: kind must be one of double_sided_is, icepop, grpo,",
        ),
        (
            with_rl(curriculum={"windw": [0.1, 0.9]}),
            'unknown key "stages.rl.curriculum.windw"; did you mean "window"?',
        ),
        (with_rl(curriculum={"window": [0.9, 0.1]}), r"window \[0.9, 0.1\] is empty"),
        (
            with_rl(curriculum={"sampling": "window", "target": 0.3}),
            'target does nothing unless sampling is "thompson"; leave it out',
        ),
        (
            with_rl(curriculum={"sampling": "uniform", "window": [0.2, 0.8]}),
            'window does nothing unless sampling is not "uniform"',
        ),
        (with_rl(curriculum={"promote_at": 0.5}), "promote_at does nothing unless start_level"),
        (
            with_rl(batch_invariant=True, dtype="bfloat16"),
            'batch_invariant = true with dtype = "bfloat16"',
        ),
        (
            with_rl(batch_invariant=True),
            'stage "rl": batch_invariant = true with engine.deterministic = false',
        ),
        (
            {**with_rl(batch_invariant=True), "engine": {"deterministic": True, "weights": "int8"}},
            'batch_invariant = true with engine.weights = "int8": .* set engine.weights = "same"',
        ),
        (with_rl(dynamic={"max_overgeneration": 0.5}), r"max_overgeneration: .*equal to 1"),
        (with_rl(objective={"kind": "grpo", "beta": 2}), "unknown key .*beta.*known: eps_high"),
        (with_rl(objective={"kind": "icepop", "beta": 1}), r"objective\.beta: .*greater than 1"),
        (
            with_rl(eps_low=0.1, objective={"kind": "grpo"}),
            r"eps_low beside objective; move it to \[stages.objective\]",
        ),
        (
            with_rl(tasks={"a": 1, "b": {"ratio": 1, "concurency": 8}}),
            'unknown key "stages.rl.tasks.b.concurency"; did you mean "concurrency"?',
        ),
        (
            with_rl(tasks={"a": 1, "b": "x"}),
            "stages.rl.tasks.b: give a ratio, e.g. 0.5, or a table",
        ),
        (with_rl(tasks={"a": 1, "b": {"concurrency": 8}}), "stages.rl.tasks.b.ratio is missing"),
        (with_rl(tasks={"a": 1, "b": 0}), "stages.rl.tasks.b.ratio: .*greater than 0"),
        (
            with_rl(tasks={"a": 1, "b": {"ratio": 3, "floor": 0.8}}),
            "tasks.b.floor 0.8 is above the share that its ratio asks for, 0.75",
        ),
        (with_rl(ratios={"rule": "success"}), 'ratios.rule "success" has nothing to move'),
        (
            with_rl(tasks={"a": 1, "b": 1}, ratios={"rule": "progress", "learnable": [0.1, 0.9]}),
            'learnable is for rule "success", not for "progress"',
        ),
        (with_change(stages=[{"kind": "sft", "name": "a"}]), "give steps, seconds or both"),
        (with_change(stages=MINIMAL["stages"] * 2), 'two stages are named "rl"'),
        ({"model": {"path": "x"}, "stages": MINIMAL["stages"]}, "name is missing"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(data, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_recipe(data, "file.toml")
    assert str(caught.value).startswith("file.toml: ")
    assert "\n" not in str(caught.value)


def test_a_task_of_several_is_a_number_or_a_table_with_limits():
    tasks = {"a": 1, "b": {"ratio": 3, "concurrency": 8, "floor": 0.02}, "c": 96.0}
    recipe = parse_recipe(with_rl(tasks=tasks, ratios={"rule": "shortage", "floor": 0.1}), "f")
    stage = recipe.stages[0]
    assert isinstance(stage, AgenticRlStage)
    assert stage.task_ratios == {"a": 1.0, "b": 3.0, "c": 96.0}
    assert stage.tasks["b"].concurrency == 8
    limits = share_limits(stage.ratios, stage.tasks)
    # A share below the common floor is its own floor, so that targets are always allowed.
    assert limits["a"] == (0.01, 0.01, 1.0)
    assert [limits[name].floor for name in "bc"] == [0.02, 0.1]
    assert parse_recipe(recipe.model_dump(mode="json"), "f") == recipe


def test_overrides(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text(
        'name="x"\nmodel.path="m"\n[[stages]]\nkind="agentic_rl"\nname="rl"\nupdates=3\n'
    )
    recipe = load_recipe(file, ["stages.rl.updates=7", "engine.dtype=bfloat16"], seed=5)
    assert recipe.seed == 5
    assert recipe.engine.dtype == "bfloat16"
    assert recipe.stages[0].updates == 7  # type: ignore[union-attr] # only one kind here
    for bad, message in [
        ("stages.rl.objective.kind=popice", "kind must be one of double_sided_is"),
        ("engine", "write table.key=value"),
        ("stages.rll.updates=1", 'no stage "rll"; did you mean "rl"'),
        ("name.x=1", "name is not a table"),
        ("stages.rl.updates=many", "stages.rl.updates"),
    ]:
        with pytest.raises(UserError, match=message):
            load_recipe(file, [bad])


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        find_recipe(tmp_path / "none.toml")
    file = tmp_path / "bad.toml"
    file.write_text("name = ")
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(file)


MEASURED = {"every": 4}


def test_modes_in_step_have_their_own_staleness():
    assert rl_stage(staleness=6).tau == 6
    assert rl_stage(staleness=6, mode="one_step_off").tau == 1
    assert rl_stage(staleness=6, mode="sync").tau == 0


def test_a_stage_that_gives_the_best_keeps_it():
    assert not rl_stage().keeps_best
    assert not rl_stage(evaluation=MEASURED).keeps_best
    assert rl_stage(evaluation={**MEASURED, "keep_best": True}).keeps_best
    assert rl_stage(evaluation=MEASURED, result="best").keeps_best


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mode": "sync", "publish_every": 2}, 'publish_every 2: mode "sync" publishes after'),
        ({"result": "best"}, r"result looks at what is measured; add \[stages.evaluation\]"),
        ({"stop": {"score": 0.5}}, "stop looks at what is measured"),
        ({"stop": {"min_gain": 0.5}, "evaluation": MEASURED}, "gives no rule; give score"),
        ({"evaluation": MEASURED, "publish_every": 3}, "every 4 is no multiple of publish_every 3"),
        ({"evaluation": {**MEASURED, "cores": []}}, "names no core"),
        ({"evaluation": {**MEASURED, "instances": 400}}, "instances 400 exceeds .* 300"),
        ({"evaluation": {**MEASURED, "score": "terminl"}}, 'did you mean "terminal"'),
        ({"evaluation": {**MEASURED, "instanses": 4}}, 'did you mean "instances"'),
        ({"updates": None}, "give updates, seconds or both, or trained_tokens"),
    ],
)
def test_mistakes_in_how_a_stage_goes_and_ends_are_named(keys, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(with_rl(**keys), "t")


def test_what_is_measured_beside_training_needs_held_out_instances_and_a_free_name():
    rl = {**MINIMAL["stages"][0], "evaluation": MEASURED, "result": "best"}
    with pytest.raises(UserError, match=r"evaluation needs \[evaluation\]"):
        parse_recipe(with_change(stages=[rl], measure={"text_bytes": 0}), "t")
    with pytest.raises(UserError, match='stage "rl-best" has the name under which'):
        parse_recipe(with_change(stages=[rl, {**rl, "name": "rl-best"}]), "t")
