"""docs/recipes.md is generated; it must be what the generator writes now."""

from pathlib import Path

from headrace.recipe import AgenticRlStage, EngineTable, Objective, Recipe, SftStage, tables_in
from headrace.recipe_docs import render_recipe_docs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render_recipe_docs(), "run: make docs"


def test_every_key_of_every_table_is_described():
    page = render_recipe_docs()
    for table in (Recipe, EngineTable, SftStage, AgenticRlStage, *tables_in(Objective)):
        for key, field in table.model_fields.items():
            assert f"| `{key}` |" in page
            assert field.description, f"{table.__name__}.{key} has no docstring"


def test_defaults_and_bounds_are_shown():
    page = render_recipe_docs()
    assert "| `eps_low` | number > 0.0 and < 1.0 | 0.2 |" in page
    assert "| `reset_optimizer` | true, false | true |" in page
    assert "| `updates` | integer >= 1 |  |" in page
    assert "| `engine_cores` | list of integers |" in page


def test_a_default_that_differs_by_stage_kind_is_listed_with_the_kind():
    sections = {part.partition("\n")[0]: part for part in render_recipe_docs().split("\n## ")}
    warmup = sections['[[stages]] with kind = "dsa_warmup"']
    rl = sections['[[stages]] with kind = "agentic_rl"']
    assert "| `learning_rate` | number > 0.0 | 0.005 |" in warmup
    assert "| `learning_rate` | number > 0.0 | 0.0002 |" in rl
