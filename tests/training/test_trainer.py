"""The trainer: laws L12 and L14, and that each objective teaches what it should."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_cases import CASES, GLM5, LLAMA, gradients, new_samples, new_trainer, step

from headrace.errors import UserError
from headrace.model.decoder import Decoder
from headrace.model.moe import Router
from headrace.rollout.types import Segment
from headrace.training.batch import (
    Sample,
    plan_micro_batches,
    rollout_sample,
    supervised_sample,
)
from headrace.training.forward import LossConfig
from headrace.training.guards import GuardConfig, TrainingStopped
from headrace.training.trainer import NonFiniteLossError, OptimizerConfig, RlConfig, Trainer

CONFIG = LLAMA
RL = RlConfig(0.2, 0.28)


def trainer(micro_tokens: int = 8192, learning_rate: float = 1e-2) -> Trainer:
    torch.set_num_threads(1)
    model = Decoder(CONFIG)
    model.init_weights(0)
    return Trainer(model, OptimizerConfig(learning_rate, micro_tokens=micro_tokens))


def supervised(seed: int = 0, count: int = 9) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        n = int(rng.integers(3, 20))
        samples.append(
            supervised_sample(rng.integers(0, 40, n).tolist(), rng.integers(0, 2, n).tolist())
        )
    return samples


def weights(t: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in t.model.parameters()])


def rollouts(t: Trainer, version: int = 3) -> list[Sample]:
    """Random sequences whose rollout logprobs are the trainer's own."""
    rng = np.random.default_rng(5)
    samples = []
    for i in range(6):
        n = int(rng.integers(6, 16))
        ids = rng.integers(0, 40, n).tolist()
        with torch.no_grad():
            logits = t.model.logits(t.model(torch.tensor([ids])))[0]
            logp = torch.log_softmax(logits.float(), -1)
        mask = [j > 3 for j in range(n)]
        samples.append(
            rollout_sample(
                Segment(
                    "s",
                    tuple(ids),
                    tuple(mask),
                    tuple(float(logp[j - 1, ids[j]]) if mask[j] else 0.0 for j in range(n)),
                    tuple(version if m else -1 for m in mask),
                ),
                advantage=0.5 if i % 2 else -0.5,
                multiplicity=1 + i % 2,
            )
        )
    return samples


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 80), st.integers(1, 4))
def test_plans_keep_the_bound_and_every_sequence_on_equal_numbers_of_micro_batches(
    lengths, max_tokens, ranks
):
    plan = plan_micro_batches(lengths, max_tokens, ranks)
    batches = [batch for rank in plan for batch in rank]
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert all(len(b) < 2 or sum(lengths[i] for i in b) <= max_tokens for b in batches)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) <= max(1, -(-len(lengths) // ranks)), "none is empty without need"


def test_plans_share_tokens_evenly():
    lengths = [37 * i % 101 + 1 for i in range(400)]
    plan = plan_micro_batches(lengths, 2048, 2)
    shares = [sum(lengths[i] for batch in rank for i in batch) for rank in plan]
    assert max(shares) / min(shares) < 1.02
    assert len(plan[0]) <= sum(lengths) / 2048 / 2 + 2


def test_same_seed_same_weights_to_the_bit():
    runs = []
    for _ in range(2):
        t = trainer()
        for seed in range(3):
            t.supervised_step(supervised(seed))
        t.rl_step(rollouts(t), RL, version=3, fresh=True)
        runs.append(weights(t))
    assert torch.equal(runs[0], runs[1])


def test_supervised_steps_learn_only_where_the_weight_is():
    t = trainer()
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    sample = [supervised_sample(ids, [0, 0, 0, 0, 1, 1, 1, 1])]
    for _ in range(60):
        t.supervised_step(sample)
    with torch.no_grad():
        logp = torch.log_softmax(t.model.logits(t.model(torch.tensor([ids])))[0], -1)
    got = [float(logp[j - 1, ids[j]]) for j in range(1, 8)]
    assert min(got[3:]) > -0.05
    assert max(got[:3]) < -1.0


def test_rl_raises_good_and_lowers_bad_and_reports_the_mismatch():
    t = trainer(learning_rate=1e-3)
    samples = rollouts(t)
    metrics = t.rl_step(samples, RL, version=3, fresh=True)
    assert metrics["mismatch_max_abs"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["lag_max"] == 0
    again = t.rl_step(samples, RL, version=5, fresh=False)
    assert "mismatch_max_abs" not in again
    assert again["lag_mean"] == 2
    ratios = []
    for sample in samples:
        ids = np.frombuffer(sample.ids, "<i4").astype(int)
        old = np.frombuffer(sample.logprobs, "<f4")
        with torch.no_grad():
            new = torch.log_softmax(t.model.logits(t.model(torch.tensor([ids.tolist()])))[0], -1)
        now = sum(float(new[j - 1, ids[j]]) for j in range(4, len(ids)))
        ratios.append((sample.advantage, now - float(old[4:].sum())))
    assert all(change > 0 for advantage, change in ratios if advantage > 0)
    assert all(change < 0 for advantage, change in ratios if advantage < 0)


def test_repeating_a_sample_equals_its_multiplicity():
    t, u = trainer(), trainer()
    samples = rollouts(t)[1:2]
    single = rollouts(t)[1:2]
    halved = Sample(
        single[0].ids,
        (np.frombuffer(single[0].weights, "<f4") / 2).astype("<f4").tobytes(),
        single[0].logprobs,
        single[0].versions,
        single[0].advantage,
    )
    first = t.rl_step([*samples, *rollouts(t)[2:3]], RL, version=3, fresh=True)
    second = u.rl_step([halved, halved, *rollouts(u)[2:3]], RL, version=3, fresh=True)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    torch.testing.assert_close(weights(t), weights(u))


def test_non_finite_numbers_never_reach_the_weights():
    t = trainer()
    samples = rollouts(t)
    poisoned = Sample(
        samples[0].ids, samples[0].weights, samples[0].logprobs, samples[0].versions, float("nan")
    )
    before = weights(t).clone()
    with pytest.raises(NonFiniteLossError, match="weights unchanged"):
        t.rl_step([poisoned], RL, version=3, fresh=True)
    assert torch.equal(weights(t), before)
    t.rl_step(samples, RL, version=3, fresh=True)


def test_a_checkpoint_restores_weights_and_optimizer(tmp_path):
    from headrace.model.checkpoint import load_checkpoint

    t = trainer()
    t.supervised_step(supervised(0))
    t.save(tmp_path / "c", tokenizer_from=None, optimizer=True)
    t.supervised_step(supervised(1))
    u = Trainer(load_checkpoint(tmp_path / "c"), OptimizerConfig(1e-2))
    assert u.restore_optimizer(tmp_path / "c")
    u.supervised_step(supervised(1))
    assert torch.equal(weights(t), weights(u))


def test_a_batch_without_trained_tokens_or_with_too_long_a_sample_is_refused():
    with pytest.raises(ValueError, match="loss weight"):
        trainer().supervised_step([supervised_sample([1, 2], [1, 0])])
    with pytest.raises(ValueError, match="65 tokens; the model has 64"):
        trainer().supervised_step([supervised_sample([1] * 65, [1] * 65)])


def test_packed_documents_do_not_see_each_other():
    """A document's loss beside others is its loss alone."""
    t = trainer()
    samples = [s for s in supervised() if np.frombuffer(s.weights, "<f4")[1:].any()]
    together = t.loss_and_gradients(samples).total
    weights = [float(np.frombuffer(s.weights, "<f4")[1:].sum()) for s in samples]
    alone = [t.loss_and_gradients([s]).total for s in samples]
    expected = sum(a * w for a, w in zip(alone, weights, strict=True)) / sum(weights)
    assert together == pytest.approx(expected, rel=1e-5)


def test_only_the_named_parameters_train():
    case = CASES["language"]._replace(config=GLM5)
    for trainable, moves in (
        ("indexer", lambda name: ".indexer." in name),
        ("all_but_indexer", lambda name: ".indexer." not in name and "mtp" not in name),
    ):
        losses = LossConfig(index="dense", language=False) if trainable == "indexer" else None
        t = new_trainer(case._replace(trainable=trainable, losses=losses or LossConfig()))
        before = {n: p.detach().clone() for n, p in t.model.named_parameters()}
        step(t, case, new_samples(case))
        moved = {n for n, p in t.model.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {n for n in before if moves(n)}


def test_parts_the_model_lacks_are_refused():
    case = CASES["language"]
    for losses, name in (
        (LossConfig(mtp_weight=0.1), "mtp_weight"),
        (LossConfig(balance_weight=0.1), "balance_weight"),
        (LossConfig(index="sparse"), "index"),
        (LossConfig(language=False), "language"),
    ):
        with pytest.raises(UserError, match=name):
            new_trainer(case._replace(losses=losses))
    with pytest.raises(UserError, match="add an indexer"):
        new_trainer(case._replace(trainable="indexer"))


def test_router_bias_moves_against_the_load():
    case = CASES["balance"]
    t = new_trainer(case)
    routers = [m for m in t.model.modules() if isinstance(m, Router)]
    step(t, case, new_samples(case))
    moved = torch.stack([r.bias for r in routers[:2]])
    assert torch.all((moved.abs() - 0.01).abs().lt(1e-7) | (moved == 0))
    assert torch.all(moved.max(1).values > 0)
    assert torch.all(moved.min(1).values < 0)


def test_the_indexer_learns_to_rank_keys_as_attention_does():
    case = CASES["indexer warm-up"]
    t = new_trainer(case, learning_rate=1e-2)
    losses = [step(t, case, new_samples(case))["loss"] for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]


def test_guarded_training_skips_bad_steps_and_stops_after_several():
    t = trainer()
    t.guard = GuardConfig(bad_steps=2)
    bad = [Sample(s.ids, s.weights, s.logprobs, s.versions, float("nan")) for s in rollouts(t)]
    before = weights(t).clone()
    metrics = t.rl_step(bad, RL, version=3, fresh=True)
    assert metrics["skipped"] == 1.0
    assert torch.equal(weights(t), before)
    with pytest.raises(TrainingStopped, match=r"2 bad steps in a row.*loss nan"):
        t.rl_step(bad, RL, version=3, fresh=True)
    assert t.steps == 0


@pytest.mark.parametrize(
    # Rounding flips some of the choices of experts and keys, hence the second tolerance.
    ("name", "tolerance"),
    [("language", 0.05), ("indexer adaptation", 0.5)],
)
def test_bfloat16_products_stay_close_and_leave_float32_weights(name, tolerance):
    case = CASES[name]
    exact, half = new_trainer(case), new_trainer(case, bfloat16=True, micro_tokens=40)
    wanted, found = (
        torch.cat([g.flatten() for g in gradients(t, case, new_samples(case)).values()])
        for t in (exact, half)
    )
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < tolerance * wanted.norm()
    assert not torch.equal(found, wanted)
    step(half, case, new_samples(case))
    assert all(p.dtype == torch.float32 for p in half.model.parameters())
    assert len(list(half.model.parameters())) == len(list(exact.model.parameters()))


def test_half_weights_give_what_autocast_alone_gives():
    case = CASES["language"]
    swapped, cast = (new_trainer(case, bfloat16=True) for _ in range(2))
    cast._half = None
    a, b = (gradients(t, case, new_samples(case)) for t in (swapped, cast))
    for key in b:
        torch.testing.assert_close(a[key], b[key], rtol=0.02, atol=1e-4)
