"""The off-policy benchmark: its problem can be checked, its lags are real, its keys are fixed."""

import pytest
import torch

import offpolicy_stability as bench


def test_rewards_are_shares_of_right_symbols_and_logprobs_are_the_policys():
    policy = bench.new_policy(0)
    prompts = torch.tensor([[0, 1, 2], [5, 4, 3]])
    found = bench.roll_out(policy, prompts, torch.Generator().manual_seed(0))
    for row, prompt in zip(found.ids.tolist(), prompts.tolist(), strict=True):
        right = sum(a == b for a, b in zip(row[4:], prompt[::-1], strict=True))
        assert found.rewards[found.ids.tolist().index(row)].item() == pytest.approx(right / 3)
    with torch.no_grad():
        scores = policy.logits(policy(found.ids)).log_softmax(-1)[:, 3:6]
    wanted = scores.gather(2, found.ids[:, 4:, None])[..., 0]
    torch.testing.assert_close(found.logprobs, wanted)


@pytest.mark.parametrize("method", ["icepop", "double_sided"])
def test_a_lag_makes_the_objective_mask(method):
    """On policy nothing is masked; a lag that is not real would change nothing."""
    fresh, stale = (
        bench.run(bench.Job(method, lag, 0, updates=12, groups=4, group_size=4, learning_rate=1e-2))
        for lag in (0, 8)
    )
    assert fresh.masked == 0.0
    assert stale.masked > 0.02
    assert 0.0 <= fresh.final <= fresh.best <= 1.0


def test_metrics_have_the_same_keys_whatever_the_size():
    one = bench.Outcomes(0.5, 0.6, 1.0, 0.1, False)
    found = {
        (m, lag): [one, one._replace(final=0.1, collapsed=True)]
        for m in bench.METHODS
        for lag in bench.LAGS
    }
    metrics = bench.summarise(found)
    assert metrics["reward_icepop_lag8"] == pytest.approx(0.3)
    assert metrics["collapses_none"] == len(bench.LAGS)
    assert len(metrics) == 5 * 4 * 6 + 5 * 2
