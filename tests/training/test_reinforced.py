"""RL updates: whole trajectories, the old policy, other models, and what is reported."""

import msgspec
import numpy as np
import pytest
import torch
from law_cases import CASES, GLM5, LLAMA, RL, SPREAD, Case, new_samples, new_trainer, weights

from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder
from headrace.recipe import AgenticRlStage
from headrace.stages.agentic_rl import load_request
from headrace.training.batch import Sample
from headrace.training.parallel import ALONE
from headrace.training.reinforced import RlConfig, deal_steps
from headrace.training.rl_record import RlRecord
from headrace.training.trainer import OptimizerConfig, Trainer
from headrace.training.worker import TrainerWorker


def logprobs(model: Decoder, sample: Sample) -> np.ndarray:
    """float64 [M] of the sample's trained tokens."""
    ids = np.frombuffer(sample.ids, "<i4").astype(int)
    with torch.no_grad():
        scores = model.logits(model(torch.tensor([ids.tolist()])))[0].double().log_softmax(-1)
    return np.array([float(scores[j - 1, ids[j]]) for j in _trained(sample)])


def rollout_logprobs(sample: Sample) -> np.ndarray:
    return np.frombuffer(sample.logprobs, "<f4").astype(float)[_trained(sample)]


def _trained(sample: Sample) -> list[int]:
    return [j for j, w in enumerate(np.frombuffer(sample.weights, "<f4")) if j and w]


@pytest.mark.parametrize("micro_tokens", [10_000, 40, 1])
def test_trajectories_are_masked_whole_however_their_segments_are_spread(micro_tokens):
    case = Case(LLAMA, rl=SPREAD)
    trainer, samples = new_trainer(case, micro_tokens=micro_tokens), new_samples(case, count=16)
    gaps: dict[int, list[float]] = {}
    for sample in samples:
        found = logprobs(trainer.model, sample) - rollout_logprobs(sample)
        gaps.setdefault(sample.trajectory, []).extend(found)
    ratios = {n: float(np.exp(np.mean(g))) for n, g in gaps.items() if g}
    tokens = sum(len(g) for g in gaps.values())
    low = sum(len(gaps[n]) for n, r in ratios.items() if r <= 1 - SPREAD.sample_eps_low) / tokens
    high = sum(len(gaps[n]) for n, r in ratios.items() if r >= 1 + SPREAD.sample_eps_high) / tokens
    metrics = trainer.rl_step(samples, SPREAD, version=3, fresh=True)
    assert metrics["masked_sample_low"] == pytest.approx(low)
    assert metrics["masked_sample_high"] == pytest.approx(high)
    assert 0 < low + high < 1


def test_the_old_policy_is_the_one_that_the_update_began_with():
    """r of eq. 1 compares with it in every step, and rho compares it with the engine."""
    rl = RlConfig(kind="icepop", minibatches=2)
    case = Case(LLAMA, rl=rl)
    trainer, samples = new_trainer(case, learning_rate=1e-2), new_samples(case)
    steps = deal_steps(samples, 2)
    before = [logprobs(trainer.model, s) for s in samples]
    metrics = trainer.rl_step(samples, rl, version=3, fresh=True)
    assert trainer.steps == 2
    assert metrics["trained_tokens"] == sum(len(b) for b in before)

    # The second step began where a lone first one ends.
    single = new_trainer(case, learning_rate=1e-2)
    single.rl_step([samples[i] for i in steps[0]], RlConfig(kind="icepop"), version=3, fresh=True)
    moved = [np.exp(logprobs(single.model, samples[i]) - before[i]) for i in steps[1]]
    ratios = np.concatenate([np.ones(sum(len(before[i]) for i in steps[0])), *moved])
    assert metrics["policy_ratio_p99"] == pytest.approx(np.quantile(ratios, 0.99), rel=1e-4)
    assert metrics["policy_ratio_p01"] == pytest.approx(np.quantile(ratios, 0.01), rel=1e-4)
    assert abs(ratios - 1).max() > 0.01


def test_one_step_asks_nobody_and_is_on_policy():
    rl = RlConfig(kind="grpo")
    trainer = new_trainer(Case(LLAMA, rl=rl))
    metrics = trainer.rl_step(new_samples(Case(LLAMA, rl=rl)), rl, version=3, fresh=True)
    assert trainer.ask_policies(new_samples(Case(LLAMA, rl=rl)), rl) == (None, None, None)
    assert metrics["policy_ratio_p01"] == metrics["policy_ratio_p99"] == 1.0


def test_steps_hold_whole_trajectories_and_every_trained_token_once():
    case = CASES["rl"]
    samples = new_samples(case, count=30)
    steps = deal_steps(samples, 4)
    owners = [{samples[i].trajectory for i in step} for step in steps]
    assert len(steps) == 4
    assert sum(map(len, owners)) == len(set().union(*owners))
    left = set(range(30)) - {i for step in steps for i in step}
    assert all(not _trained(samples[i]) for i in left)
    assert deal_steps(samples[:1], 4) == []


def test_the_kl_keeps_close_to_the_reference():
    def distance(rl: RlConfig) -> float:
        case = Case(LLAMA, rl=rl)
        trainer, samples = new_trainer(case, learning_rate=3e-3), new_samples(case)
        return [trainer.rl_step(samples, rl, version=3, fresh=False) for _ in range(8)][-1][
            "kl_reference"
        ]

    loose = RlConfig(kind="none", kl_weight=1e-6)
    assert distance(loose._replace(kl_weight=5.0)) < 0.5 * distance(loose)


def test_distillation_moves_the_student_towards_each_samples_teacher():
    case = CASES["rl, two teachers"]
    assert case.rl is not None
    trainer, samples = new_trainer(case, learning_rate=1e-3), new_samples(case)
    teachers = [Decoder(LLAMA) for _ in range(2)]
    for seed, teacher in enumerate(teachers, start=2):
        teacher.init_weights(seed)

    own = []
    for sample in samples:
        exact = logprobs(trainer.model, sample)
        wide = np.zeros(len(sample), "<f4")
        wide[_trained(sample)] = exact
        own.append(msgspec.structs.replace(sample, logprobs=wide.tobytes()))
    before = [logprobs(trainer.model, s) for s in own]
    wanted = [logprobs(teachers[s.teacher], s) - b for s, b in zip(own, before, strict=True)]
    trainer.rl_step(own, case.rl, version=3, fresh=True)
    moved = [logprobs(trainer.model, s) - b for s, b in zip(own, before, strict=True)]
    assert float(np.corrcoef(np.concatenate(wanted), np.concatenate(moved))[0, 1]) > 0.5


def test_missing_policies_are_named():
    model = Decoder(LLAMA)
    model.init_weights(0)
    trainer = Trainer(model, OptimizerConfig(1e-3))
    samples = new_samples(CASES["rl"])
    for rl, message in (
        (RlConfig(kl_weight=0.1), "kl_weight = 0.1 needs a reference"),
        (RlConfig(kind="distillation"), "needs a teacher"),
    ):
        with pytest.raises(UserError, match=message):
            trainer.rl_step(samples, rl, version=3, fresh=True)
    trainer.keep_policies(teachers=[model])
    with pytest.raises(UserError, match=r"name teachers \[1\], but 1 are loaded"):
        trainer.rl_step(samples, RlConfig(kind="distillation"), version=3, fresh=True)


def test_metrics_equal_brute_force_over_all_tokens():
    case = CASES["rl"]
    trainer, samples = new_trainer(case, micro_tokens=30), new_samples(case)
    versions = {1: 3, 2: 1, 3: 0}  # by trajectory
    aged = []
    for sample in samples:
        version = versions.get(sample.trajectory, 3)
        mask = np.frombuffer(sample.weights, "<f4") > 0
        aged.append(
            msgspec.structs.replace(
                sample, versions=np.where(mask, version, -1).astype("<i4").tobytes()
            )
        )
    new = np.concatenate([logprobs(trainer.model, s) for s in aged])
    old = np.concatenate([rollout_logprobs(s) for s in aged])
    lag = np.concatenate([[3 - versions.get(s.trajectory, 3)] * len(_trained(s)) for s in aged])
    metrics = trainer.rl_step(aged, RL, version=3, fresh=True)
    ratio = np.exp(new - old)
    masked = (ratio <= 0.8) | (ratio >= 1.28)
    two = lag == 2
    wanted = {
        "trained_tokens": len(new),
        "ratio_mean": ratio.mean(),
        "ratio_p01": np.quantile(ratio, 0.01),
        "ratio_p50": np.quantile(ratio, 0.5),
        "ratio_p99": np.quantile(ratio, 0.99),
        "masked_token_low": (ratio <= 0.8).mean(),
        "masked_token_high": (ratio >= 1.28).mean(),
        "kl_rollout": (old - new).mean(),
        "effective_sample_size": ratio.sum() ** 2 / (ratio**2).sum(),
        "lag_mean": lag.mean(),
        "lag_2_share": two.mean(),
        "lag_2_masked": masked[two].mean(),
        "lag_2_kl_rollout": (old - new)[two].mean(),
        "lag_2_effective_sample_share": ratio[two].sum() ** 2 / (ratio[two] ** 2).sum() / two.sum(),
        "lag_3_4_share": (lag == 3).mean(),
        "mismatch_max_abs": np.abs(old - new)[lag == 0].max(),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert "lag_1_share" not in metrics


def test_shares_by_side_add_up_over_reasons():
    record = RlRecord(version=40)
    record.add(
        {
            "reason": torch.arange(10, dtype=torch.uint8),
            "version": torch.tensor([0] * 5 + [40] * 5),
            **{name: torch.ones(10) for name in ("ratio", "gap", "entropy", "fresh")},
        }
    )
    metrics = record.metrics(ALONE)
    assert (metrics["masked_low"], metrics["masked_high"]) == pytest.approx((0.4, 0.4))
    assert metrics["masked_clip_low"] == metrics["truncated"] == pytest.approx(0.1)
    assert metrics["lag_17_up_share"] == metrics["lag_0_share"] == 0.5


@pytest.mark.parametrize("freeze", [True, False])
def test_rl_leaves_the_indexer_alone_unless_asked(tmp_path, freeze):
    """From the stage's table to the trainer's weights, with KL from a reference on the way."""
    model = Decoder(GLM5)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "c", tokenizer_from=None)
    given = {"kind": "agentic_rl", "name": "rl", "updates": 1}
    given |= {"objective": {"kind": "icepop", "kl_weight": 0.01}}
    given |= {} if freeze else {"freeze_indexer": False}
    stage = AgenticRlStage.model_validate(given)
    worker = TrainerWorker(None)  # type: ignore[arg-type] # nothing is served
    worker._do_load(
        **load_request(stage, tmp_path / "c", reference=tmp_path / "c", run_dir=tmp_path)
    )
    assert worker.trainer is not None
    before = weights(worker.trainer)
    samples = [msgspec.to_builtins(s, builtin_types=(bytes,)) for s in new_samples(CASES["rl"])]
    metrics = worker._do_rl(samples, version=3, learning_rate=1e-2)
    after = weights(worker.trainer)
    assert metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    indexers = {name for name in before if "indexer" in name and ".mtp" not in name}
    assert any("kv_b" in name or "embed" in name for name in moved)
    assert bool(moved & indexers) == (not freeze)
