"""Recipes: every mistake is one line that names the place, the value and the remedy."""

import pytest

from headrace.errors import UserError
from headrace.recipe import AgenticRlStage, find_recipe, load_recipe, parse_recipe

MINIMAL = {
    "name": "x",
    "model": {"path": "smollm2-135m-instruct"},
    "stages": [{"kind": "agentic_rl", "name": "rl", "updates": 3}],
}


def with_change(**changes):
    return {**MINIMAL, **changes}


def test_defaults_follow_the_paper():
    stage = parse_recipe(MINIMAL, "t").stages[0]
    assert isinstance(stage, AgenticRlStage)
    assert stage.reset_optimizer
    assert (stage.eps_low, stage.eps_high) == (0.2, 0.28)


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
