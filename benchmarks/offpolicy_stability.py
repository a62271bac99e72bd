"""What each objective makes of stale rollouts: a small RL problem at forced lags.

A two-layer transformer from random weights learns to write its prompt backwards; the reward is the
share of symbols that are right, checked, not judged. At lag L every update trains on rollouts of
the weights of L updates ago, with the real trainer and objectives; nothing else differs between the
methods, which share seeds, prompts and optimizer.

`reward_METHOD_lagL` is the reward of samples from the final weights on fresh prompts, mean over
seeds; `best_*` the highest seen on the way, `spread_*` the highest minus the lowest seed's final
reward, `entropy_*` of the final policy in nats per token, `masked_*` the mean share of tokens
without a gradient, `collapses_*` how many seeds ended with less than half of what they had gained
at their best, or with numbers that are not finite.
"""

import argparse
import statistics
import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.rollout.groups import ScoredRollout, advantages
from headrace.rollout.types import Outcome, Segment
from headrace.training.batch import Sample, rollout_sample
from headrace.training.reinforced import RlConfig
from headrace.training.trainer import NonFiniteLossError, OptimizerConfig, Trainer
from report import fill_sizes, new_parser, print_report
from worker_pool import worker_pool

METHODS = {
    "none": RlConfig(kind="none"),
    "ppo_rollout": RlConfig(0.2, 0.2, kind="ppo_rollout"),
    "truncated_is": RlConfig(kind="truncated_is"),
    "icepop": RlConfig(kind="icepop"),
    "double_sided": RlConfig(),
}
LAGS = (0, 2, 8, 32)
SYMBOLS, LENGTH, ASK = 6, 3, 6
"""Symbols are ids 0 to 5; id 6 asks for the answer."""
EVERY = 10
"""Updates between measurements."""


class Job(NamedTuple):
    """One run."""

    method: str
    lag: int
    seed: int
    updates: int
    groups: int
    group_size: int
    learning_rate: float


class Outcomes(NamedTuple):
    """What one run came to."""

    final: float
    best: float
    entropy: float
    masked: float
    collapsed: bool


def new_policy(seed: int) -> Decoder:
    """Random weights."""
    config = ModelConfig(
        vocab_size=SYMBOLS + 1,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=12,
        max_positions=16,
    )
    model = Decoder(config)
    model.init_weights(seed)
    return model


class Rollouts(NamedTuple):
    """B sampled answers.

    Attributes:
        ids: int64 [B, 2 LENGTH + 1], prompt, request and answer.
        logprobs, entropies: float32 [B, LENGTH] of the answer.
        rewards: float32 [B] in [0, 1].
    """

    ids: Tensor
    logprobs: Tensor
    entropies: Tensor
    rewards: Tensor


@torch.no_grad()
def roll_out(policy: Decoder, prompts: Tensor, generator: torch.Generator) -> Rollouts:
    """Sample an answer to each of the prompts, int64 [B, LENGTH]."""
    ids = torch.cat((prompts, torch.full((len(prompts), 1), ASK)), 1)
    logprobs, entropies = [], []
    for _ in range(LENGTH):
        scores = policy.logits(policy(ids))[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        logprobs.append(scores.gather(1, drawn))
        entropies.append(-(scores.exp() * scores).sum(-1, keepdim=True))
        ids = torch.cat((ids, drawn), 1)
    right = ids[:, LENGTH + 1 :] == prompts.flip(1)
    return Rollouts(ids, torch.cat(logprobs, 1), torch.cat(entropies, 1), right.float().mean(1))


def training_samples(found: Rollouts, group_size: int, version: int) -> list[Sample]:
    """Rollouts with the advantages of their groups; groups without signal are left out."""
    samples: list[Sample] = []
    given = LENGTH + 1
    for first in range(0, len(found.ids), group_size):
        rewards = found.rewards[first : first + group_size].tolist()
        scored = [ScoredRollout(str(first + i), Outcome.OK, r) for i, r in enumerate(rewards)]
        for member in advantages(scored).members:
            row = int(member.session_id)
            segment = Segment(
                member.session_id,
                tuple(found.ids[row].tolist()),
                (False,) * given + (True,) * LENGTH,
                (0.0,) * given + tuple(found.logprobs[row].tolist()),
                (-1,) * given + (version,) * LENGTH,
            )
            samples.append(rollout_sample(segment, member.advantage, trajectory=row, group=first))
    return samples


def run(job: Job) -> Outcomes:
    """Train once."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(job.seed)
    trainer = Trainer(new_policy(job.seed), OptimizerConfig(job.learning_rate))
    behaviour = new_policy(job.seed)
    # Its first entry is the weights of `lag` updates ago, or the first ones there were.
    past: deque[dict[str, Tensor]] = deque(maxlen=job.lag + 1)
    prompts = torch.randint(
        SYMBOLS, (256, LENGTH), generator=torch.Generator().manual_seed(10_000 + job.seed)
    )
    rewards, masked, broken = [], [], False
    entropy = 0.0
    for update in range(job.updates + 1):
        if update % EVERY == 0 or update == job.updates:
            held_out = torch.Generator().manual_seed(update)
            measured = roll_out(trainer.model, prompts, held_out)
            rewards.append(float(measured.rewards.mean()))
            entropy = float(measured.entropies.mean())
        if update == job.updates:
            break
        past.append({name: t.clone() for name, t in trainer.model.state_dict().items()})
        behaviour.load_state_dict(past[0])
        asked = torch.randint(SYMBOLS, (job.groups, LENGTH), generator=generator)
        asked = asked.repeat_interleave(job.group_size, 0)
        version = update - (len(past) - 1)
        found = training_samples(roll_out(behaviour, asked, generator), job.group_size, version)
        if not found:
            continue
        try:
            metrics = trainer.rl_step(found, METHODS[job.method], version=update, fresh=True)
        except NonFiniteLossError:
            broken = True
            break
        masked.append(metrics["masked_low"] + metrics["masked_high"])
    first, best, final = rewards[0], max(rewards), rewards[-1]
    collapsed = broken or final - first < 0.5 * (best - first)
    return Outcomes(final, best, entropy, statistics.fmean(masked or [0.0]), collapsed)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Flags, with sizes filled in."""
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, help="runs of each method at each lag")
    parser.add_argument("--updates", type=int, help="optimizer updates of a run")
    parser.add_argument("--groups", type=int, default=8, help="groups per update")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per group")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    return fill_sizes(parser.parse_args(arguments), (("seeds", 1, 3), ("updates", 40, 200)))


def summarise(found: dict[tuple[str, int], list[Outcomes]]) -> dict[str, float]:
    """Flat metrics of all runs, by (method, lag)."""
    metrics: dict[str, float] = {}
    for (method, lag), outcomes in found.items():
        name = f"{method}_lag{lag}"
        finals = [o.final for o in outcomes]
        metrics[f"reward_{name}"] = statistics.fmean(finals)
        metrics[f"best_{name}"] = statistics.fmean(o.best for o in outcomes)
        metrics[f"spread_{name}"] = max(finals) - min(finals)
        metrics[f"entropy_{name}"] = statistics.fmean(o.entropy for o in outcomes)
        metrics[f"masked_{name}"] = statistics.fmean(o.masked for o in outcomes)
        metrics[f"collapses_{name}"] = float(sum(o.collapsed for o in outcomes))
    for method in METHODS:
        metrics[f"collapses_{method}"] = sum(metrics[f"collapses_{method}_lag{x}"] for x in LAGS)
        metrics[f"reward_min_{method}"] = min(metrics[f"reward_{method}_lag{x}"] for x in LAGS)
    return metrics


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    started = time.perf_counter()
    sizes = (
        arguments.updates,
        arguments.groups,
        arguments.group_size,
        arguments.learning_rate,
    )
    # Longest first would not help: all runs are equally long. Seeds outermost, so that methods and
    # lags share whatever the machine does meanwhile.
    jobs = [
        Job(method, lag, seed, *sizes)
        for seed in range(arguments.seeds)
        for lag in LAGS
        for method in METHODS
    ]
    found: dict[tuple[str, int], list[Outcomes]] = {}
    with worker_pool(arguments.processes) as pool:
        for job, outcomes in zip(jobs, pool.map(run, jobs), strict=True):
            found.setdefault((job.method, job.lag), []).append(outcomes)
    metrics = summarise(found) | {"wall_s": time.perf_counter() - started}
    chance = 1 / SYMBOLS
    print_report(
        "offpolicy_stability",
        arguments,
        metrics,
        f"Chance is a reward of {chance:.3f}, a perfect policy has 1. A toy: answers of {LENGTH} "
        "tokens, so ratios of whole trajectories stay nearer 1 than in agentic tasks. The first L "
        "updates at lag L train on rollouts of the first weights. icepop's old policy is the one "
        "that trains, so its mismatch ratio holds the whole drift since the rollout.",
        methods={name: rl._asdict() for name, rl in METHODS.items()},
        lags=LAGS,
    )


if __name__ == "__main__":
    main()
