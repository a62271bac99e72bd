"""Log-probabilities of samples without gradients: of policies other than the one that trains.

The policy that an update begins with, a reference and teachers are asked in the micro-batches that
the update itself will use, so that every rank finds what it needs at home.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.model.decoder import Decoder
from headrace.training.batch import Sample
from headrace.training.forward import LossConfig, Pass
from headrace.training.parallel import CPU, Ranks
from headrace.training.reinforced import (
    Policies,
    ReinforcedBatch,
    RlConfig,
    Scores,
    split_trajectories,
    trajectory_numbers,
)
from headrace.training.rows import Rows, pack, trained_weights

Batches = Sequence[Sequence[int]]
"""Sample indices of each micro-batch of one rank."""


class OtherPolicies:
    """Models that are only ever asked; every rank holds all of them.

    Args:
        reference: what the KL keeps close to.
        teachers: numbered as samples name them.
        bfloat16: matrix products in bfloat16, as the trainer's.
        device: where to keep them.
    """

    def __init__(
        self,
        reference: Decoder | None = None,
        teachers: Sequence[Decoder] = (),
        *,
        bfloat16: bool = False,
        device: torch.device = CPU,
    ) -> None:
        def freeze(model: Decoder) -> Pass:
            model.requires_grad_(False).eval()
            return Pass(model.to(device), LossConfig(), bfloat16=bfloat16)

        self._reference = None if reference is None else freeze(reference)
        self._teachers = [freeze(teacher) for teacher in teachers]
        self._device = device

    def check(self, rl: RlConfig) -> None:
        """Refuse an objective whose other policies are missing.

        Raises:
            UserError: naming what is missing.
        """
        if rl.kl_weight > 0 and self._reference is None:
            raise UserError(
                f"objective {rl.kind}: kl_weight = {rl.kl_weight:g} needs a reference checkpoint; "
                "load one or set kl_weight = 0"
            )
        if rl.kind == "distillation" and not self._teachers:
            raise UserError("objective distillation needs a teacher checkpoint; load at least one")

    def ask(
        self, samples: Sequence[Sample], batches: Batches, rl: RlConfig, current: Pass
    ) -> Policies:
        """What an objective needs to know about the samples of one optimizer step.

        Args:
            samples: of the step.
            batches: those of this rank.
            rl: the objective.
            current: the policy that trains, as it is now.
        """
        old = reference = teacher = None
        if rl.needs_old_policy:
            old = _score(current, samples, batches, rl.temperature, self._device)
        if rl.kl_weight > 0 and self._reference is not None:
            reference = _score(self._reference, samples, batches, rl.temperature, self._device)
        if rl.kind == "distillation":
            teacher = self._judge(samples, batches, rl.temperature)
        return Policies(old, reference, teacher)

    def _judge(self, samples: Sequence[Sample], batches: Batches, temperature: float) -> Scores:
        """Each sample under its own teacher."""
        wrong = {s.teacher for s in samples if not 0 <= s.teacher < len(self._teachers)}
        if wrong:
            raise UserError(
                f"samples name teachers {sorted(wrong)}, but {len(self._teachers)} are loaded; "
                "teachers are numbered from 0"
            )
        found: list[Tensor | None] = [None] * len(samples)
        for number, teacher in enumerate(self._teachers):
            own = [[i for i in batch if samples[i].teacher == number] for batch in batches]
            own = [batch for batch in own if batch]
            scores = _score(teacher, samples, own, temperature, self._device)
            found = [old if new is None else new for old, new in zip(found, scores, strict=True)]
        return found


def look_ahead(
    batch: ReinforcedBatch,
    samples: Sequence[Sample],
    plan: Sequence[Batches],
    current: Pass,
    ranks: Ranks,
) -> None:
    """Find the ratios of trajectories that are spread over micro-batches or ranks.

    Args:
        batch: told about them.
        samples: of the optimizer step.
        plan: sample indices as [rank][micro-batch].
        current: the policy that trains, as it is now.
        ranks: all must call.
    """
    numbers = trajectory_numbers(samples)
    spread = split_trajectories(plan, numbers)
    rounds = [
        [[i for i in indices if numbers[i] in spread] for indices in of_all]
        for of_all in zip(*plan, strict=True)
    ]
    mine = [of_all[ranks.rank] for of_all in rounds if any(of_all)]
    temperature = batch.rl.temperature
    for indices, rows, logprobs in _scored(current, samples, mine, temperature, ranks.device):
        batch.add_ratio_sums(rows, logprobs, indices)
    batch.ratio_sums = ranks.sum(batch.ratio_sums)


@torch.no_grad()
def _scored(
    run: Pass,
    samples: Sequence[Sample],
    batches: Batches,
    temperature: float,
    device: torch.device,
) -> Iterator[tuple[Sequence[int], Rows, Tensor]]:
    """(sample indices, packed rows, [M] log-probabilities of their trained tokens) of each.

    Empty micro-batches run too, as a sharded model's ranks have to keep in step.
    """
    for indices in batches:
        rows = pack([samples[i] for i in indices]).to(device)
        yield indices, rows, run(rows, temperature).logprobs


def _score(
    run: Pass,
    samples: Sequence[Sample],
    batches: Batches,
    temperature: float,
    device: torch.device,
) -> list[Tensor | None]:
    """[M_i] for each sample of `batches`, None for the others."""
    found: list[Tensor | None] = [None] * len(samples)
    for indices, _, logprobs in _scored(run, samples, batches, temperature, device):
        if not indices:
            continue
        counts = [len(trained_weights(samples[i])) for i in indices]
        for index, part in zip(indices, logprobs.split(counts), strict=True):
            found[index] = part
    return found
