"""One optimizer step at a time: a model, its optimizers and the objectives, in this process.

The trainer knows token sequences, weights and advantages. It does not know where they came from,
nor when to stop. Whatever the micro-batching, a step's loss and gradient are the whole batch's
(law L14).
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder
from headrace.objectives.double_sided_is import double_sided_is
from headrace.objectives.language_model import token_logprobs, weighted_nll
from headrace.optim.muon import Muon, matrix_blocks
from headrace.training.batch import Sample, micro_batches


class OptimizerConfig(NamedTuple):
    """AdamW and step limits; see the stage tables of `headrace.recipe` for meanings."""

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    micro_tokens: int = 8192
    bfloat16: bool = False
    muon: bool = False


class RlConfig(NamedTuple):
    """Constants of the RL objective."""

    eps_low: float
    eps_high: float
    temperature: float = 1.0


class NonFiniteLossError(Exception):
    """A loss or gradient norm is not finite; the weights were left as they were."""


class _Rows(NamedTuple):
    """A right-padded micro-batch and its trained positions.

    ids [B, T]; where [N] flat indices into B*T of positions that predict a trained token; targets,
    weights, rollout_logprobs, versions, advantages, each [N].
    """

    ids: Tensor
    where: Tensor
    targets: Tensor
    weights: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    advantages: Tensor


class Trainer:
    """Holds the weights that are being trained."""

    def __init__(self, model: Decoder, config: OptimizerConfig) -> None:
        self.model = model
        self.config = config
        model.train()
        self.optimizers = _optimizers(model, config)
        self.steps = 0

    # -- steps ------------------------------------------------------------------------------

    def supervised_step(
        self, samples: Sequence[Sample], learning_rate: float | None = None
    ) -> dict[str, float]:
        """One step of weighted next-token loss.

        Returns:
            loss (weighted mean, nats per token), grad_norm, tokens (all tokens read).
        """
        total = sum(float(np.frombuffer(s.weights, "<f4")[1:].sum()) for s in samples)
        if total <= 0:
            raise ValueError("supervised_step: no token of the batch has a loss weight")
        loss_sum = 0.0
        for rows in self._micro_batches(samples):
            logprobs, _ = self._score(rows)
            loss = weighted_nll(logprobs, rows.weights, total)
            loss.backward()
            loss_sum += loss.item()
        norm = self._apply(loss_sum, learning_rate)
        return {
            "loss": loss_sum,
            "grad_norm": norm,
            "tokens": float(sum(len(s) for s in samples)),
        }

    def rl_step(
        self,
        samples: Sequence[Sample],
        rl: RlConfig,
        *,
        version: int,
        fresh: bool,
        learning_rate: float | None = None,
    ) -> dict[str, float]:
        """One step of the double-sided importance-sampling objective.

        Args:
            samples: rollout samples (see `rollout_sample`).
            rl: constants.
            version: newest published version; lag of a token = version - its version.
            fresh: whether the weights still are exactly that version, so that tokens sampled from
                it measure the mismatch between trainer and engine (law L11).

        Returns:
            loss, grad_norm and the objective's metrics as flat numbers; ratios, entropy and KL are
            means over trained tokens.
        """
        total = sum(float(np.frombuffer(s.weights, "<f4")[1:].sum()) for s in samples)
        if total <= 0:
            raise ValueError("rl_step: the batch has no trained token")
        loss_sum = 0.0
        ratios: list[Tensor] = []
        gaps: list[Tensor] = []
        lags: list[Tensor] = []
        low = high = tokens = 0
        entropy_sum = 0.0
        mismatches: list[Tensor] = []
        for rows in self._micro_batches(samples):
            logprobs, entropies = self._score(rows, rl.temperature)
            result = double_sided_is(
                logprobs,
                rows.rollout_logprobs,
                rows.advantages,
                rows.weights,
                eps_low=rl.eps_low,
                eps_high=rl.eps_high,
                normalizer=total,
            )
            result.loss.backward()
            loss_sum += result.loss.item()
            gap = rows.rollout_logprobs - logprobs.detach()
            ratios.append(result.ratio)
            gaps.append(gap)
            lags.append(version - rows.versions)
            low += int(result.masked_low.sum())
            high += int(result.masked_high.sum())
            tokens += gap.numel()
            entropy_sum += float(entropies.sum())
            if fresh:
                mismatches.append(gap[rows.versions == version].abs())
        norm = self._apply(loss_sum, learning_rate)
        ratio = torch.cat(ratios)
        lag = torch.cat(lags).float()
        weight = ratio.clamp(max=1e4)
        metrics = {
            "loss": loss_sum,
            "grad_norm": norm,
            "trained_tokens": float(tokens),
            "masked_low": low / tokens,
            "masked_high": high / tokens,
            "ratio_mean": float(ratio.mean()),
            "ratio_p01": float(ratio.quantile(0.01)),
            "ratio_p99": float(ratio.quantile(0.99)),
            "effective_sample_share": float(weight.sum() ** 2 / (weight**2).sum() / tokens),
            "kl_rollout": float(torch.cat(gaps).mean()),
            "entropy": entropy_sum / tokens,
            "lag_mean": float(lag.mean()),
            "lag_max": float(lag.max()),
        }
        mismatch = torch.cat(mismatches) if mismatches else torch.empty(0)
        if mismatch.numel():
            metrics["mismatch_mean_abs"] = float(mismatch.mean())
            metrics["mismatch_max_abs"] = float(mismatch.max())
        return metrics

    # -- state ------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        """Forget all optimizer state (paper section 4.1.1: after each publication)."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def save(self, path: Path, *, tokenizer_from: Path | None, optimizer: bool) -> None:
        """Write a checkpoint directory, whole or not at all; `optimizer` adds its state beside."""
        save_checkpoint(self.model, path, tokenizer_from=tokenizer_from)
        if optimizer:
            temporary = path / "trainer.pt.tmp"
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            torch.save({"optimizers": states, "steps": self.steps}, temporary)
            temporary.replace(path / "trainer.pt")

    def restore_optimizer(self, path: Path) -> bool:
        """Load optimizer state saved by `save`; False when the checkpoint has none."""
        file = path / "trainer.pt"
        if not file.is_file():
            return False
        state = torch.load(file, weights_only=True)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.steps = int(state["steps"])
        return True

    # -- parts ------------------------------------------------------------------------------

    def _micro_batches(self, samples: Sequence[Sample]) -> list[_Rows]:
        batches = micro_batches([len(s) for s in samples], self.config.micro_tokens)
        return [_pad([samples[i] for i in batch]) for batch in batches]

    def _score(self, rows: _Rows, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(logprobs [N] with gradient, entropies [N]) of the trained tokens of a micro-batch."""
        autocast = torch.autocast("cpu", torch.bfloat16) if self.config.bfloat16 else nullcontext()
        with autocast:
            # Right padding needs no mask: attention is causal, so real tokens never see it.
            hidden = self.model(rows.ids)
            selected = hidden.flatten(0, 1).index_select(0, rows.where)
            return token_logprobs(
                selected, rows.targets, self.model.logits, temperature=temperature
            )

    def _apply(self, loss: float, learning_rate: float | None) -> float:
        """Clip, step and clear; refuses non-finite numbers before they reach the weights."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.model.zero_grad(set_to_none=True)
            raise NonFiniteLossError(
                f"step {self.steps}: loss {loss}, gradient norm {norm}; weights unchanged"
            )
        for optimizer in self.optimizers:
            if learning_rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.steps += 1
        return norm


def _optimizers(model: Decoder, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the matrices inside the layers and AdamW for the rest."""
    blocks = matrix_blocks(model) if config.muon else []
    taken = {parameter for parameter, _ in blocks}
    rest = [p for p in model.parameters() if p not in taken]
    adamw = torch.optim.AdamW(
        [
            {
                "params": [p for p in rest if p.dim() >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )
    if not blocks:
        return [adamw]
    return [Muon(blocks, config.learning_rate, weight_decay=config.weight_decay), adamw]


def _pad(samples: Sequence[Sample]) -> _Rows:
    """Right-pad samples into one micro-batch and pick out the trained positions."""
    length = max(len(s) for s in samples)
    shape = (len(samples), length)
    ids = np.zeros(shape, "<i8")
    weights = np.zeros(shape, "<f4")
    logprobs = np.zeros(shape, "<f4")
    versions = np.full(shape, -1, "<i8")
    advantages = np.zeros(shape, "<f4")
    for row, sample in enumerate(samples):
        n = len(sample)
        ids[row, :n] = np.frombuffer(sample.ids, "<i4")
        weights[row, :n] = np.frombuffer(sample.weights, "<f4")
        if sample.logprobs:
            logprobs[row, :n] = np.frombuffer(sample.logprobs, "<f4")
            versions[row, :n] = np.frombuffer(sample.versions, "<i4")
        advantages[row] = sample.advantage
    weights[:, 0] = 0.0
    rows, columns = np.nonzero(weights)
    return _Rows(
        ids=torch.from_numpy(ids),
        where=torch.from_numpy(rows * length + columns - 1),
        targets=torch.from_numpy(ids[rows, columns]),
        weights=torch.from_numpy(weights[rows, columns]),
        rollout_logprobs=torch.from_numpy(logprobs[rows, columns]),
        versions=torch.from_numpy(versions[rows, columns]),
        advantages=torch.from_numpy(advantages[rows, columns]),
    )
