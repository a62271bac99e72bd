"""An RL objective over the batch of one optimizer step: weights, old policies, whole trajectories.

What an objective needs beyond one micro-batch is gathered here, so that the objectives stay pure
functions of tokens: normalisation over the whole batch, log-probabilities of the policy that the
update began with, of a reference and of teachers, and geometric-mean ratios of trajectories that
are spread over micro-batches or ranks. It does not know models; whoever does scores the samples.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.objectives.clipped import clipped_surrogate
from headrace.objectives.distillation import distillation_advantages
from headrace.objectives.double_sided_is import Interval, double_sided_is, log_ratio_sums
from headrace.objectives.icepop import icepop
from headrace.objectives.kl import Estimator, kl_penalty, kl_terms
from headrace.objectives.normalisation import Normalisation, normalised_weights
from headrace.objectives.policy_tokens import PolicyResult, importance_ratio
from headrace.objectives.score_function import policy_gradient, truncated_is
from headrace.training.batch import Sample
from headrace.training.forward import PassOutput
from headrace.training.rl_record import RlRecord
from headrace.training.rows import Rows, trained_weights

Kind = Literal[
    "double_sided_is", "icepop", "grpo", "ppo_rollout", "truncated_is", "none", "distillation"
]
_OLD_POLICY = ("icepop", "grpo", "distillation")


class RlConfig(NamedTuple):
    """An RL objective and its constants; see the objective tables of `headrace.recipe`.

    Attributes:
        eps_low, eps_high: of double_sided_is (token level) and of clipping.
        temperature: that rollouts were sampled at.
        kind: the objective.
        token_level, sample_level, sample_eps_low, sample_eps_high: of double_sided_is.
        beta: of icepop and distillation.
        cap: of truncated_is.
        normalisation: see `normalised_weights`.
        kl_weight, kl_estimator: of the KL from the reference; 0 needs no reference.
        minibatches: optimizer steps that one batch is dealt out to.
    """

    eps_low: float = 0.2
    eps_high: float = 0.28
    temperature: float = 1.0
    kind: Kind = "double_sided_is"
    token_level: bool = True
    sample_level: bool = False
    sample_eps_low: float = 0.1
    sample_eps_high: float = 0.1
    beta: float = 2.0
    cap: float = 2.0
    normalisation: Normalisation = "token_mean"
    kl_weight: float = 0.0
    kl_estimator: Estimator = "k3"
    minibatches: int = 1

    @property
    def needs_old_policy(self) -> bool:
        """Whether the policy that the update begins with has to be asked before the first step.

        With a single step it is the policy that is trained, and nothing has to be computed twice.
        """
        return self.kind in _OLD_POLICY and self.minibatches > 1

    @property
    def needs_trajectory_ratios(self) -> bool:
        """Whether a token's loss depends on the other tokens of its trajectory."""
        return self.kind == "double_sided_is" and self.sample_level


Scores = Sequence[Tensor | None]
"""Log-probabilities of each sample's trained tokens, [M_i]; None for another rank's samples."""


class Policies(NamedTuple):
    """What other policies say about the samples of one optimizer step; None where not needed.

    Attributes:
        old: the trainer at the start of the update.
        reference: the policy that the KL keeps close to.
        teacher: each sample's teacher.
    """

    old: Scores | None = None
    reference: Scores | None = None
    teacher: Scores | None = None


class ReinforcedBatch:
    """The objective of one optimizer step, called with its micro-batches.

    Args:
        samples: of the step, the same on every rank.
        rl: which objective.
        policies: what it needs besides the trainer's and the engine's log-probabilities.

    Raises:
        ValueError: no token has a loss weight.
    """

    def __init__(self, samples: Sequence[Sample], rl: RlConfig, policies: Policies) -> None:
        self.rl = rl
        self.policies = policies
        trajectories = trajectory_numbers(samples)
        per_sample = [trained_weights(sample) for sample in samples]
        self._counts = torch.tensor([len(w) for w in per_sample])
        self._trajectories = torch.tensor(trajectories)
        weights = torch.from_numpy(np.concatenate(per_sample))
        normalised = normalised_weights(
            weights,
            self._trajectories.repeat_interleave(self._counts),
            torch.tensor(_group_numbers(samples, trajectories)).repeat_interleave(self._counts),
            rl.normalisation,
        )
        self._weights = normalised.float().split(self._counts.tolist())
        self.ratio_sums = torch.zeros(2, max(trajectories, default=0) + 1, dtype=torch.float64)
        """[2, trajectories] of those that no single micro-batch holds; the others count 0."""

    def add_ratio_sums(self, rows: Rows, logprobs: Tensor, indices: Sequence[int]) -> None:
        """Take part of trajectories into account that later micro-batches hold only parts of."""
        self.ratio_sums += log_ratio_sums(
            logprobs,
            rows.rollout_logprobs,
            rows.weights,
            self._tokens_trajectories(indices).to(logprobs.device),
            self.ratio_sums.shape[1],
        ).cpu()

    def loss(
        self,
        rows: Rows,
        output: PassOutput,
        indices: Sequence[int],
        record: RlRecord | None,
        *,
        fresh: bool,
    ) -> Tensor:
        """The loss of one micro-batch, a part of the whole step's.

        Args:
            rows, output: the packed samples and what the model made of them.
            indices: which samples they are.
            record: told about every token.
            fresh: whether the weights are exactly the newest published version.
        """
        device = rows.ids.device
        logprobs = output.logprobs
        weights = torch.cat([rows.weights[:0], *(self._weights[i].to(device) for i in indices)])
        old = self._scores(self.policies.old, indices, logprobs)
        result = self._objective(rows, logprobs, weights, old, indices)
        loss = result.loss
        columns = {}
        if self.rl.kl_weight > 0:
            reference = self._scores(self.policies.reference, indices, logprobs)
            if self.policies.reference is None:
                raise ValueError("kl_weight > 0, but there is no reference policy")
            estimator = self.rl.kl_estimator
            penalty = kl_penalty(logprobs, reference, weights, estimator)
            loss = loss + self.rl.kl_weight * penalty
            columns["kl_reference"] = kl_terms(logprobs.detach(), reference, estimator)
        if self.policies.teacher is not None:
            teacher = self._scores(self.policies.teacher, indices, logprobs)
            columns["kl_teacher"] = logprobs.detach() - teacher
        if record is not None:
            live = rows.weights > 0
            if self.rl.kind in _OLD_POLICY:
                columns["policy_ratio"] = importance_ratio(logprobs, old, live)
            record.add(
                {
                    "ratio": importance_ratio(logprobs, rows.rollout_logprobs, live),
                    "gap": rows.rollout_logprobs - logprobs.detach(),
                    "entropy": output.entropies,
                    "reason": result.reasons,
                    "version": rows.versions,
                    "fresh": torch.full_like(logprobs.detach(), float(fresh)),
                    **columns,
                }
            )
        return loss

    def _objective(
        self,
        rows: Rows,
        logprobs: Tensor,
        weights: Tensor,
        old: Tensor,
        indices: Sequence[int],
    ) -> PolicyResult:
        rl, rollout, advantages = self.rl, rows.rollout_logprobs, rows.advantages
        clip = {"eps_low": rl.eps_low, "eps_high": rl.eps_high}
        match rl.kind:
            case "double_sided_is":
                return double_sided_is(
                    logprobs,
                    rollout,
                    advantages,
                    weights,
                    token=Interval(rl.eps_low, rl.eps_high) if rl.token_level else None,
                    sample=Interval(rl.sample_eps_low, rl.sample_eps_high)
                    if rl.sample_level
                    else None,
                    trajectory_log_ratios=self._trajectory_ratios(rows, logprobs, indices)
                    if rl.sample_level
                    else None,
                )
            case "icepop":
                return icepop(logprobs, old, rollout, advantages, weights, beta=rl.beta, **clip)
            case "grpo":
                return clipped_surrogate(logprobs, old, advantages, weights, **clip)
            case "ppo_rollout":
                return clipped_surrogate(logprobs, rollout, advantages, weights, **clip)
            case "truncated_is":
                return truncated_is(logprobs, rollout, advantages, weights, cap=rl.cap)
            case "none":
                return policy_gradient(logprobs, rollout, advantages, weights)
            case "distillation":
                if self.policies.teacher is None:
                    raise ValueError("distillation without a teacher")
                teacher = self._scores(self.policies.teacher, indices, logprobs)
                advantages = distillation_advantages(teacher, logprobs)
                return icepop(logprobs, old, rollout, advantages, weights, beta=rl.beta, **clip)

    def _trajectory_ratios(self, rows: Rows, logprobs: Tensor, indices: Sequence[int]) -> Tensor:
        """[M] mean log ratio of each token's whole trajectory."""
        numbers = self._tokens_trajectories(indices).to(logprobs.device)
        here = log_ratio_sums(
            logprobs, rows.rollout_logprobs, rows.weights, numbers, self.ratio_sums.shape[1]
        )
        elsewhere = self.ratio_sums.to(here.device)
        # Of a trajectory that is spread, the parts seen before include the part that is here.
        total, count = torch.where(elsewhere[1:] > 0, elsewhere, here)
        return (total / count.clamp(min=1.0))[numbers].to(logprobs.dtype)

    def _tokens_trajectories(self, indices: Sequence[int]) -> Tensor:
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self._trajectories[chosen].repeat_interleave(self._counts[chosen])

    def _scores(self, scores: Scores | None, indices: Sequence[int], logprobs: Tensor) -> Tensor:
        """[M] of these samples; the policy that is trained itself where nobody was asked."""
        if scores is None:
            return logprobs.detach()
        found = [logprobs.detach()[:0]]
        for index in indices:
            mine = scores[index]
            if mine is None:
                raise ValueError(f"sample {index} was scored on another rank than it is trained on")
            found.append(mine.to(logprobs.device))
        return torch.cat(found)


def trajectory_numbers(samples: Sequence[Sample]) -> list[int]:
    """A number from 0 for each sample's trajectory, in order of first appearance."""
    return _numbers(
        ("alone", index) if sample.trajectory < 0 else ("shared", sample.trajectory)
        for index, sample in enumerate(samples)
    )


def deal_steps(samples: Sequence[Sample], steps: int) -> list[list[int]]:
    """Sample indices of each optimizer step: whole trajectories, about equally many tokens.

    In the batch's order, so that groups stay together as far as possible. Fewer steps than asked
    for when there are fewer trajectories with trained tokens.
    """
    members: dict[int, list[int]] = {}
    for index, number in enumerate(trajectory_numbers(samples)):
        members.setdefault(number, []).append(index)
    sizes = [sum(len(trained_weights(samples[i])) for i in own) for own in members.values()]
    total = max(sum(sizes), 1)
    dealt: list[list[int]] = [[] for _ in range(steps)]
    before = 0
    for own, size in zip(members.values(), sizes, strict=True):
        middle = before + size / 2
        dealt[min(steps - 1, int(middle * steps / total))] += own
        before += size
    return [own for own in dealt if any(len(trained_weights(samples[i])) for i in own)]


def split_trajectories(
    plan: Sequence[Sequence[Sequence[int]]], trajectories: Sequence[int]
) -> set[int]:
    """Trajectories that no single micro-batch of [rank][micro-batch] holds all of."""
    places: dict[int, set[tuple[int, int]]] = {}
    for rank, batches in enumerate(plan):
        for number, indices in enumerate(batches):
            for index in indices:
                places.setdefault(trajectories[index], set()).add((rank, number))
    return {trajectory for trajectory, found in places.items() if len(found) > 1}


def _group_numbers(samples: Sequence[Sample], trajectories: Sequence[int]) -> list[int]:
    """A number from 0 for each sample's group."""
    return _numbers(
        ("alone", number) if sample.group < 0 else ("shared", sample.group)
        for sample, number in zip(samples, trajectories, strict=True)
    )


def _numbers(names: Iterable[tuple[str, int]]) -> list[int]:
    """The same number for the same name, from 0 in order of first appearance."""
    numbers: dict[tuple[str, int], int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]
