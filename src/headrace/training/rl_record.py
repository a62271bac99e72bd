"""What an RL update reports about the tokens it trained, over all micro-batches and ranks."""

import torch
from torch import Tensor

from headrace.training.parallel import Ranks


class RlRecord:
    """What the trained tokens of a batch looked like: one row of numbers for each.

    Columns: ratio, rollout minus trainer logprob, entropy, masked low, masked high, version.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """float64 [M, 6]."""
        self._rows.append(rows.cpu())

    def metrics(self, ranks: Ranks, *, fresh: bool) -> dict[str, float]:
        """See `Trainer.rl_step`."""
        rows = ranks.gather(torch.cat(self._rows))
        ratio, gap, entropy, low, high, versions = rows.unbind(1)
        tokens = rows.shape[0]
        weight = ratio.clamp(max=1e4)
        lag = self._version - versions
        metrics = {
            "trained_tokens": float(tokens),
            "masked_low": float(low.mean()),
            "masked_high": float(high.mean()),
            "ratio_mean": float(ratio.mean()),
            "ratio_p01": float(ratio.quantile(0.01)),
            "ratio_p99": float(ratio.quantile(0.99)),
            "effective_sample_share": float(weight.sum() ** 2 / (weight**2).sum() / tokens),
            "kl_rollout": float(gap.mean()),
            "entropy": float(entropy.mean()),
            "lag_mean": float(lag.mean()),
            "lag_max": float(lag.max()),
        }
        mismatch = gap[versions == self._version].abs() if fresh else gap[:0]
        if mismatch.numel():
            metrics["mismatch_mean_abs"] = float(mismatch.mean())
            metrics["mismatch_max_abs"] = float(mismatch.max())
        return metrics
