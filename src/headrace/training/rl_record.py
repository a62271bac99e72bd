"""What an RL update reports about the tokens it trained, over all micro-batches, steps and ranks.

Every trained token is one row of a few numbers. Rows of all ranks are gathered before anything is
computed, so means, shares and quantiles are those of the whole batch, exactly: nothing is averaged
over micro-batches. That costs 72 bytes per trained token and rank.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace.objectives.policy_tokens import HIGH_REASONS, LOW_REASONS, Reason
from headrace.training.parallel import Ranks

_LAGS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))
"""Bounds, inclusive, of lags that have metrics of their own; few, as each makes four curves."""
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
_RATIO_BOUND = 1e4
_FLAT = (*LOW_REASONS, *HIGH_REASONS)


class RlRecord:
    """The trained tokens of a batch.

    Columns: `ratio` of trainer to rollout probability, `gap` (rollout minus trainer logprob),
    `entropy`, `reason`, `version`, `fresh` (1 where the weights were exactly the newest version);
    and where the objective has them `policy_ratio` (against the policy that the update began with)
    and `kl_reference` and `kl_teacher` (how much likelier the student finds its token).
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._columns: dict[str, list[Tensor]] = {}

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """[M] each, the same names every time."""
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values.detach().double().cpu())

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """See `Trainer.rl_step`."""
        names = sorted(self._columns)
        rows = torch.stack([torch.cat(self._columns[name]) for name in names], dim=1)
        found = dict(zip(names, ranks.gather(rows).unbind(1), strict=True))
        ratio, gap, reason = found["ratio"], found["gap"], found["reason"]
        tokens = ratio.numel()
        lag = self._version - found["version"]
        metrics = {
            "trained_tokens": float(tokens),
            **_masked(reason),
            **_spread("ratio", ratio),
            "effective_sample_share": _effective_share(ratio),
            "effective_sample_size": _effective_share(ratio) * tokens,
            "kl_rollout": float(gap.mean()),
            "entropy": float(found["entropy"].mean()),
            "lag_mean": float(lag.mean()),
            "lag_max": float(lag.max()),
        }
        for first, last in _LAGS:
            of_lag = lag == first if first == last else lag >= first
            if last is not None:
                of_lag &= lag <= last
            if bool(of_lag.any()):
                metrics |= _of_lag(_lag_name(first, last), of_lag, ratio, gap, reason)
        if "policy_ratio" in found:
            metrics |= _spread("policy_ratio", found["policy_ratio"])
        for name in ("kl_reference", "kl_teacher"):
            if name in found:
                metrics[name] = float(found[name].mean())
        mismatch = gap[(found["version"] == self._version) & (found["fresh"] > 0)].abs()
        if mismatch.numel():
            metrics["mismatch_mean_abs"] = float(mismatch.mean())
            metrics["mismatch_max_abs"] = float(mismatch.max())
        return metrics


def _masked(reason: Tensor) -> dict[str, float]:
    """Shares of tokens without gradient, by side and by reason, and of those with a bounded one."""
    metrics = {
        "masked_low": _share(reason, LOW_REASONS),
        "masked_high": _share(reason, HIGH_REASONS),
    }
    metrics |= {f"masked_{r.name.lower()}": _share(reason, (r,)) for r in _FLAT}
    return {**metrics, "truncated": _share(reason, (Reason.TRUNCATED,))}


def _share(reason: Tensor, of: tuple[Reason, ...]) -> float:
    wanted = torch.tensor([float(r) for r in of], dtype=reason.dtype)
    return float(torch.isin(reason, wanted).double().mean())


def _of_lag(
    name: str, of_lag: Tensor, ratio: Tensor, gap: Tensor, reason: Tensor
) -> dict[str, float]:
    """The same numbers over the tokens of one lag."""
    return {
        f"{name}_share": float(of_lag.double().mean()),
        f"{name}_masked": _share(reason[of_lag], _FLAT),
        f"{name}_kl_rollout": float(gap[of_lag].mean()),
        f"{name}_effective_sample_share": _effective_share(ratio[of_lag]),
    }


def _lag_name(first: int, last: int | None) -> str:
    if last is None:
        return f"lag_{first}_up"
    return f"lag_{first}" if first == last else f"lag_{first}_{last}"


def _effective_share(ratio: Tensor) -> float:
    """Kish's effective sample size over the number of tokens, of bounded ratios."""
    weight = ratio.clamp(max=_RATIO_BOUND)
    return float(weight.sum() ** 2 / (weight**2).sum() / ratio.numel())


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean and quantiles; `Tensor.quantile` refuses more than 16M numbers, numpy's does not."""
    array = values.numpy()
    quantiles = {f"{name}_{q}": float(np.quantile(array, p)) for q, p in _QUANTILES.items()}
    return {f"{name}_mean": float(values.mean()), **quantiles}
