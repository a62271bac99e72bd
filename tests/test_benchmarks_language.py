"""The parts of the language-model benchmarks that compute without training."""

import pytest
import torch

import dsa_quality
import mtp_sharing
from headrace.data.retrieval import FILLER, retrieval_examples
from headrace.model.decoder import Decoder
from headrace.model.drafting import DraftRounds
from headrace.tokens.training import train_tokenizer


def test_repeated_share_counts_tokens_after_the_prompt() -> None:
    period = torch.tensor([[1, 2, 3] * 10])
    # From the 12th token on, the 9 last ones have stood there before.
    assert mtp_sharing.repeated_share(period, 6) == pytest.approx((30 - 11) / (30 - 6))
    assert mtp_sharing.repeated_share(torch.arange(30)[None], 6) == 0


def test_variants_differ_in_training_depth_only() -> None:
    arguments = mtp_sharing.parse(["--quick", "--hidden", "32"])
    models = {}
    for name, mtp in mtp_sharing.VARIANTS.items():
        models[name] = mtp_sharing.new_model(arguments, 300, mtp)
        models[name].init_weights(3)
    shared, single = (dict(m.named_parameters()) for m in models.values())
    assert shared.keys() == single.keys()
    assert all(torch.equal(shared[name], single[name]) for name in shared)
    assert [m.config.mtp.depth for m in models.values()] == [3, 1]


def test_greedy_continuation_is_the_models_own() -> None:
    arguments = mtp_sharing.parse(["--quick", "--hidden", "32", "--prompt", "6", "--new", "5"])
    model = mtp_sharing.new_model(arguments, 300, mtp_sharing.VARIANTS["single"])
    model.init_weights(0)
    prompts = torch.randint(300, (3, 6), generator=torch.Generator().manual_seed(0))
    ids = mtp_sharing.continue_greedily(model, prompts, 5)
    with torch.no_grad():
        said = model.logits(model(ids)).argmax(-1)
    assert torch.equal(ids[:, :6], prompts)
    assert torch.equal(ids[:, 6:], said[:, 5:-1])


def test_acceptance_metrics_pool_rounds_over_seeds() -> None:
    def result(rounds: int, tried: tuple[int, ...], kept: tuple[int, ...]) -> mtp_sharing.Result:
        drafts = DraftRounds(rounds, tried, kept)
        return mtp_sharing.Result(drafts, drafts, 0.0, 2.0, 3.0, 1.0)

    shared = [result(10, (10, 8), (8, 4)), result(30, (30, 12), (12, 6))]
    single = [result(20, (20, 10), (10, 5)), result(20, (20, 0), (0, 0))]
    metrics = mtp_sharing.metrics_of({"shared": shared, "single": single})
    assert metrics["accept_shared"] == pytest.approx(1 + 30 / 40)
    assert metrics["accept_single"] == pytest.approx(1 + 15 / 40)
    assert metrics["ratio"] == pytest.approx(1.75 / 1.375)
    assert metrics["rate_shared_2"] == pytest.approx(10 / 20)
    assert metrics["ratio_highest_seed"] == pytest.approx(1.6)


@pytest.mark.parametrize("flags", [["--quick"], []])
def test_retrieval_documents_fit_their_rows(flags: list[str]) -> None:
    arguments = dsa_quality.parse(flags)
    tokenizer = train_tokenizer([*dsa_quality.retrieval_texts(), *FILLER], 400)
    lengths = {dsa_quality.row_length(arguments, divisor) for _, divisor in dsa_quality.PHASES}
    assert max(lengths) == max(dsa_quality.lengths(arguments)) > 2 * arguments.topk
    for length in lengths:
        text, retrieval = dsa_quality.sources(arguments, length, "train")
        assert text.shape == "documents"
        assert text.weight + retrieval.weight == pytest.approx(1)
        found = list(retrieval_examples(retrieval.retrieval, tokenizer, 50, seed=1))
        assert max(len(e.ids) for e in found) <= length - 3


def test_scores_are_means_over_what_fits() -> None:
    score = dsa_quality.Score({(64, 1): 1.0, (64, 4): 0.5, (256, 1): 0.5, (256, 4): 0.0}, 2.0)
    assert score.mean() == 0.5
    assert score.mean(length=64) == 0.75
    assert score.mean(keys=4) == 0.25


def test_base_is_dense() -> None:
    config = dsa_quality.model_config(dsa_quality.parse(["--quick"]), 300)
    assert (config.indexer, config.moe, config.mtp) == (None, None, None)
    assert Decoder(config, device="meta").num_parameters() > 0
