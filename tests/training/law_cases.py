"""Tiny models, batches and objectives that the trainer's laws are tested with.

Run as a script it is one of two ranks, which train every case and write down what they got.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from headrace.model.config import IndexerConfig, LatentConfig, ModelConfig, MoeConfig, MtpConfig
from headrace.model.decoder import Decoder
from headrace.rollout.types import Segment
from headrace.training.batch import Sample, rollout_sample, supervised_sample
from headrace.training.checkpointing import load_state, save_state
from headrace.training.forward import LossConfig
from headrace.training.parallel import ALONE, Ranks, joined, unsharded, whole
from headrace.training.trainer import OptimizerConfig, RlConfig, Trainer

WORLD = 2
RL = RlConfig(0.2, 0.28)
SPREAD = RlConfig(
    sample_level=True, sample_eps_low=0.02, sample_eps_high=0.02, normalisation="group_mean"
)
ICEPOP = RlConfig(kind="icepop", beta=1.08, normalisation="sequence_mean", kl_weight=0.1)
"""Rollouts come with log-probabilities about 0.1 off: these bounds mask a part of them."""
LLAMA = ModelConfig(
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
GLM5 = ModelConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=12,
    max_positions=64,
    family="glm_moe_dsa",
    rope_interleaved=True,
    latent=LatentConfig(q_rank=16, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=10),
    indexer=IndexerConfig(num_heads=2, head_dim=8, topk=5, shared=(False, True, False)),
    moe=MoeConfig(4, 2, 16, leading_dense=1, scaling=1.5),
    mtp=MtpConfig(depth=2, shared=True),
)


class Case(NamedTuple):
    """One objective on one model."""

    config: ModelConfig
    losses: LossConfig = LossConfig()
    trainable: Any = "all"
    rl: RlConfig | None = None
    router_bias_rate: float = 0.0


CASES = {
    "language": Case(LLAMA),
    "rl": Case(LLAMA, rl=RL),
    "rl, samples masked": Case(LLAMA, rl=SPREAD),
    "rl, icepop and kl": Case(LLAMA, rl=ICEPOP),
    "rl, two steps": Case(LLAMA, rl=ICEPOP._replace(minibatches=2, eps_low=1e-3, eps_high=1e-3)),
    "rl, two teachers": Case(LLAMA, rl=RlConfig(kind="distillation")),
    "mtp": Case(GLM5, LossConfig(mtp_weight=0.3)),
    "balance": Case(GLM5, LossConfig(balance_weight=0.1), router_bias_rate=0.01),
    "indexer warm-up": Case(GLM5, LossConfig(index="dense", language=False), "indexer"),
    "indexer adaptation": Case(
        GLM5, LossConfig(mtp_weight=0.1, balance_weight=0.01, index="sparse")
    ),
    "rl, indexer frozen": Case(GLM5, trainable="all_but_indexer", rl=RL),
}


def new_trainer(case: Case, ranks: Ranks = ALONE, **changes: Any) -> Trainer:
    """A trainer with seeded weights."""
    torch.set_num_threads(1)
    model = Decoder(case.config)
    model.init_weights(0)
    options = {"learning_rate": 1e-3, "router_bias_rate": case.router_bias_rate, **changes}
    trainer = Trainer(
        model,
        OptimizerConfig(**options),
        losses=case.losses,
        trainable=case.trainable,
        ranks=ranks,
    )
    if case.rl is not None:
        others = [Decoder(case.config) for _ in range(3)]
        for seed, other in enumerate(others, start=1):
            other.init_weights(seed)
        trainer.keep_policies(reference=others[0], teachers=others[1:])
    return trainer


def new_samples(case: Case, seed: int = 0, count: int = 9) -> list[Sample]:
    """Documents of 1 to 20 tokens; rollouts come with slightly wrong log-probabilities.

    Two rollout samples are segments of one trajectory, two trajectories are a group.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        n = int(rng.integers(3, 20)) if number else 1
        ids = rng.integers(0, 40, n).tolist()
        if case.rl is None:
            samples.append(supervised_sample(ids, rng.integers(0, 2, n).tolist()))
            continue
        mask = tuple(i > 2 for i in range(n))
        logprobs = tuple(float(rng.normal(-np.log(40), 0.1)) if m else 0.0 for m in mask)
        versions = tuple(3 if m else -1 for m in mask)
        segment = Segment("s", tuple(ids), mask, logprobs, versions)
        sample = rollout_sample(
            segment,
            rng.normal(),
            multiplicity=1 + number // 2 % 2,
            trajectory=number // 2,
            group=number // 4,
        )
        samples.append(msgspec.structs.replace(sample, teacher=number // 2 % 2))
    return samples


def step(trainer: Trainer, case: Case, samples: list[Sample]) -> dict[str, float]:
    """One step of the case's objective."""
    if case.rl is not None:
        return trainer.rl_step(samples, case.rl, version=4, fresh=False)
    return trainer.supervised_step(samples)


def gradients(trainer: Trainer, case: Case, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Gradients of a batch by name, whole on every rank; they are cleared afterwards."""
    trainer.loss_and_gradients(samples, rl=case.rl)
    found = {
        name: whole(p.grad).clone()
        for name, p in trainer.model.named_parameters()
        if p.grad is not None
    }
    trainer.model.zero_grad(set_to_none=True)
    return found


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name, copied."""
    return {name: whole(t.detach()).clone() for name, t in trainer.model.state_dict().items()}


def results(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Gradients of a first batch, metrics of two steps and the weights after them."""
    trainer = new_trainer(case, ranks, micro_tokens=48)
    found: dict[str, Any] = {"gradients": gradients(trainer, case, new_samples(case))}
    found["metrics"] = [step(trainer, case, new_samples(case, seed)) for seed in (0, 1)]
    found["weights"] = weights(trainer)
    return found


def _run_rank(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    with joined(rank, WORLD, f"file://{folder}/rendezvous", timeout_s=300.0) as ranks:
        found = {name: results(case, ranks) for name, case in CASES.items()}
        # Two ranks that save, forget everything and go on, as two ranks here and as one elsewhere.
        case = CASES["indexer adaptation"]
        trainer = new_trainer(case, ranks)
        step(trainer, case, new_samples(case, 0))
        save_state(trainer, folder / "state", {"position": 1}, keep=1)
        step(trainer, case, new_samples(case, 1))
        found["uninterrupted"] = weights(trainer)
        resumed = new_trainer(case, ranks)
        load_state(resumed, folder / "state")
        step(resumed, case, new_samples(case, 1))
        found["resumed"] = weights(resumed)
        resumed.save(folder / "exported", tokenizer_from=None, optimizer=False)
        copy = unsharded(resumed.model, ranks)
        assert (copy is None) == (rank != 0)
        # More ranks than samples: one of them has nothing but a filler.
        lonely = new_trainer(CASES["mtp"], ranks)
        found["one sample"] = gradients(lonely, CASES["mtp"], new_samples(CASES["mtp"])[1:2])
    if rank == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]))
