"""What stages make of a recipe's tables: losses, phases, streams, framing."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models

from headrace.data.retrieval import FILLER
from headrace.data.sources import Framing
from headrace.errors import UserError
from headrace.recipe import LanguageStage, Recipe, SftStage, SupervisedStage, parse_recipe
from headrace.stages.context import optimizer_config
from headrace.stages.language import (
    corpus_spec,
    framing_of,
    losses_of,
    phases_of,
    replayed_text,
    source_spec,
)
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import SMALLEST_VOCABULARY, train_tokenizer
from headrace.training.batch import supervised_sample

FRAMING = Framing()


def recipe_of(*stages: dict[str, Any], **tables: Any) -> Recipe:
    return parse_recipe(
        {
            "name": "r",
            "seed": 3,
            "model": {"preset": "glm5-tiny"},
            "tokenizer": {"format": "glm-5"},
            "data": {"text": {}, "needles": {"shape": "retrieval", "count": 7}},
            "measure": {},
            "stages": [{"name": s["kind"], "steps": 4, **s} for s in stages],
            **tables,
        },
        "recipe",
    )


def only_stage(**table: Any) -> Any:
    return recipe_of(table).stages[0]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "pretrain"}, {"mtp_weight": 0.3, "balance_weight": 0.0}),
        (
            {"kind": "pretrain", "mtp_weight": 0, "balance_weight": 1e-4},
            {"mtp_weight": 0.0, "balance_weight": 1e-4},
        ),
        ({"kind": "dsa_warmup"}, {"language": False, "index": "dense"}),
        (
            {"kind": "dsa_adapt", "index_weight": 2.0},
            {"mtp_weight": 0.1, "balance_weight": 0.0, "index": "sparse", "index_weight": 2.0},
        ),
        (
            {"kind": "sft", "conversations": "builtin"},
            {"mtp_weight": 0.1, "balance_weight": 0.0},
        ),
    ],
    ids=lambda x: str(x.get("kind", "")),
)
def test_losses(table, expected):
    assert losses_of(only_stage(**table)) == expected


def test_optimizer_settings_reach_the_trainer():
    stage: SupervisedStage = only_stage(
        kind="pretrain",
        optimizer="muon_split",
        weight_decay=0.1,
        embedding_rate=0.5,
        router_bias_rate=1e-3,
        dtype="bfloat16",
        learning_rate=0.01,
        grad_clip=0.7,
        micro_tokens=99,
    )
    assert optimizer_config(stage) == {
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "beta2": 0.95,
        "grad_clip": 0.7,
        "micro_tokens": 99,
        "router_bias_rate": 1e-3,
        "bfloat16": True,
        "batch_invariant": False,
        "algorithm": "muon_split",
        "embedding": 0.5,
    }


def phases(recipe: Recipe, number: int = 0) -> Any:
    stage = recipe.stages[number]
    assert isinstance(stage, LanguageStage)
    return phases_of(recipe, stage, FRAMING)


def test_a_plain_stage_is_one_phase_over_all_data():
    (phase,) = phases(recipe_of({"kind": "pretrain", "sequence": 96, "batch_tokens": 1000}))
    stream = phase.request["stream"]
    assert phase.until == 1.0
    assert phase.request.keys() == {"stream"}
    assert (stream["kind"], stream["row_tokens"], stream["batch_rows"]) == ("text", 96, 10)
    sources = stream["spec"]["sources"]
    assert [(s["shape"], s["weight"]) for s in sources] == [("documents", 1), ("retrieval", 1)]
    assert stream["spec"]["framing"] == {
        "begin": ("[gMASK]", "<sop>"),
        "end": ("<|endoftext|>",),
    }


def test_a_mix_names_its_weights_and_a_sequence_larger_than_the_batch_is_one_row():
    recipe = recipe_of(
        {"kind": "pretrain", "sequence": 256, "batch_tokens": 100, "mix": {"needles": 0.25}}
    )
    stream = phases(recipe)[0].request["stream"]
    assert [s["weight"] for s in stream["spec"]["sources"]] == [0.25]
    assert stream["batch_rows"] == 1


def test_midtraining_has_a_phase_per_context_step():
    steps = [
        {"sequence": 128, "share": 0.1, "rope_theta": 4e4},
        {"sequence": 256, "share": 0.2, "mix": {"needles": 1.0}},
        {"sequence": 512, "share": 0.7},
    ]
    found = phases(recipe_of({"kind": "midtrain", "context": steps, "mix": {"text": 1.0}}))
    assert [p.until for p in found] == [pytest.approx(0.1), pytest.approx(0.3), 1.0]
    assert [p.request["positions"] for p in found] == [128, 256, 512]
    assert [p.request["rope_theta"] for p in found] == [4e4, None, None]
    streams = [p.request["stream"] for p in found]
    shapes = [[s["shape"] for s in stream["spec"]["sources"]] for stream in streams]
    assert shapes == [["documents"], ["retrieval"], ["documents"]]
    assert len({stream["seed"] for stream in streams}) == 3


def test_no_two_stages_read_in_the_same_order_and_the_seed_changes_it():
    tables = [{"kind": "pretrain"}, {"kind": "dsa_adapt"}]
    recipe = recipe_of(*tables)
    seeds = [phases(recipe, n)[0].request["stream"]["seed"] for n in range(2)]
    other = recipe_of(*tables, seed=4)
    seeds += [phases(other, n)[0].request["stream"]["seed"] for n in range(2)]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("sequence", [64, 100, 512, 4096])
def test_made_up_documents_fit_the_sequence(sequence):
    table = recipe_of({"kind": "pretrain"}).data["needles"]
    spec = source_spec(table, 0.5, sequence)
    least, most = spec.retrieval.tokens
    assert 1 <= least <= most <= sequence - 3  # framing
    assert (spec.tokens, spec.count, spec.weight) == (sequence, 7, 0.5)
    assert spec.retrieval.keys == (1, 4)


def test_tables_of_data_become_specs():
    recipe = recipe_of(
        {"kind": "pretrain"},
        data={
            "code": {
                "source": "some/folder",
                "globs": ["*.py"],
                "held_out": 0.2,
                "shape": "commits",
                "tokens": 200,
                "count": 5,
                "answer_weight": 3.0,
                "kinds": ["code"],
                "min_tokens": 50,
                "group_field": "repo",
            }
        },
    )
    table = recipe.data["code"]
    corpus = corpus_spec(table)
    assert (corpus.source, corpus.globs, corpus.held_out) == ("some/folder", ("*.py",), 0.2)
    assert corpus.group_field == "repo"
    spec = source_spec(table, 1.0, 1024)
    assert (spec.shape, spec.tokens, spec.count, spec.diff_weight) == ("commits", 200, 5, 3.0)
    assert (spec.kinds, spec.min_tokens) == (("code",), 50)


def bare_tokenizer(special: list[str], **config: Any) -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(special)
    return TextTokenizer(tokenizer, name_or_path="bare", config=config)


def test_documents_are_framed_by_the_tokens_that_there_are():
    own = train_tokenizer(["text"], SMALLEST_VOCABULARY, "glm-5")
    assert framing_of(own) == Framing()
    foreign = bare_tokenizer(["<|endoftext|>", "<sop>"])
    assert framing_of(foreign) == Framing(("<sop>",), ("<|endoftext|>",))
    named = bare_tokenizer(["</s>", "<s>"], eos_token="</s>")
    assert framing_of(named) == Framing((), ("</s>",))
    with pytest.raises(UserError, match="eos_token"):
        framing_of(bare_tokenizer(["<s>"]))


def test_sft_asks_for_demonstrations_unless_it_has_conversations():
    assert isinstance(stage := only_stage(kind="sft"), SftStage)
    assert stage.demonstrated_task == "terminal"
    assert only_stage(kind="sft", conversations="builtin").demonstrated_task is None


def test_sft_learns_text_beside_in_its_share(tmp_path):
    train_tokenizer(FILLER, 600, "glm-5").save(tmp_path)
    recipe = recipe_of(
        {
            "kind": "sft",
            "conversations": "builtin",
            "mix": {"needles": 1.0},
            "mix_share": 0.25,
            "batch_tokens": 1280,
        }
    )
    stage = recipe.stages[0]
    assert isinstance(stage, SftStage)
    samples = [supervised_sample([1] * 100, [1.0] * 100)] * 30
    text = replayed_text(recipe, stage, tmp_path, samples, 512)
    tokens = sum(map(len, text))
    assert 1000 <= tokens < 1000 + 1280
    assert max(map(len, text)) <= 160
    with pytest.raises(UserError, match=r'stage "sft": mix "txt"'):
        recipe_of({"kind": "sft", "mix": {"txt": 1.0}})
