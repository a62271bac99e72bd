"""The trainer: laws L12 and L14, and that each objective teaches what it should."""

import numpy as np
import pytest
import torch

from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.types import Segment
from headrace.training.batch import (
    Sample,
    micro_batches,
    rollout_sample,
    supervised_sample,
)
from headrace.training.trainer import NonFiniteLossError, OptimizerConfig, RlConfig, Trainer

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    tie_embeddings=True,
)
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


def test_micro_batches_keep_the_bound_and_every_sequence():
    lengths = [5, 100, 7, 7, 50, 3]
    batches = micro_batches(lengths, 20)
    assert sorted(i for b in batches for i in b) == list(range(6))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 20 for b in batches)
    assert len(batches) < 6


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_step_does_not_depend_on_micro_batching_or_order(kind):
    results = []
    for micro_tokens, reverse in [(8192, False), (24, False), (24, True)]:
        t = trainer(micro_tokens)
        samples = supervised() if kind == "sft" else rollouts(t)
        if reverse:
            samples = samples[::-1]
        metrics = (
            t.supervised_step(samples)
            if kind == "sft"
            else t.rl_step(samples, RL, version=3, fresh=True)
        )
        results.append((metrics["loss"], metrics["grad_norm"]))
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4, abs=1e-6)


def test_same_seed_same_weights_to_the_bit():
    runs = []
    for _ in range(2):
        t = trainer()
        for step in range(3):
            t.supervised_step(supervised(step))
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


def test_a_batch_without_trained_tokens_is_refused():
    with pytest.raises(ValueError, match="loss weight"):
        trainer().supervised_step([supervised_sample([1, 2], [1, 0])])
