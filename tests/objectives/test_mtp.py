"""Multi-token prediction targets and loss, against loops a person can read."""

import pytest
import torch

from headrace.objectives.mtp import mtp_loss, mtp_targets, mtp_weight_sums


def test_worked_example_two_documents():
    ids = torch.tensor([10, 11, 12, 13, 20, 21, 22])
    weights = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0, 1.0, 2.0])
    step0 = mtp_targets(ids, weights, [4, 3], 0)
    assert step0.next_ids.tolist() == [11, 12, 13, 0, 21, 22, 0]
    assert step0.where.tolist() == [0, 1, 4]
    assert step0.targets.tolist() == [12, 13, 22]
    assert step0.weights.tolist() == [1.0, 0.5, 2.0]
    step1 = mtp_targets(ids, weights, [4, 3], 1)
    assert step1.next_ids.tolist() == [12, 13, 0, 0, 22, 0, 0]
    assert (step1.where.tolist(), step1.targets.tolist()) == ([0], [13])
    step2 = mtp_targets(ids, weights, [4, 3], 2)
    assert step2.where.numel() == 0
    assert mtp_weight_sums(weights, [4, 3], 3).tolist() == [3.5, 0.5, 0.0]


@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_targets_equal_a_loop_over_documents(step):
    generator = torch.Generator().manual_seed(step)
    lengths = [1, 7, 2, 0, 5, 3]
    ids = torch.randint(1, 50, (sum(lengths),), generator=generator)
    weights = torch.randint(0, 3, (sum(lengths),), generator=generator).float()
    got = mtp_targets(ids, weights, lengths, step)
    start, where, total = 0, [], 0.0
    for length in lengths:
        for t in range(length):
            inside = t + step + 1 < length
            assert got.next_ids[start + t] == (ids[start + t + step + 1] if inside else 0)
            if t + step + 2 < length and weights[start + t + step + 2] > 0:
                where.append(start + t)
                total += float(weights[start + t + step + 2])
        start += length
    assert got.where.tolist() == where
    assert got.targets.tolist() == [int(ids[w + step + 2]) for w in where]
    assert float(got.weights.sum()) == total
    assert float(mtp_weight_sums(weights, lengths, step + 1)[step]) == total


def test_loss_and_gradient_equal_the_float64_reference():
    generator = torch.Generator().manual_seed(0)
    logprobs = [
        (-torch.rand(n, generator=generator, dtype=torch.float64)).requires_grad_()
        for n in (5, 4, 0)
    ]
    weights = [torch.rand(n, generator=generator, dtype=torch.float64) for n in (5, 4, 0)]
    sums = [7.0, 3.0, 0.0]
    loss = mtp_loss(logprobs, weights, sums)
    expected = 0.0
    for logprob, weight, total in zip(logprobs, weights, sums, strict=True):
        for value, w in zip(logprob.tolist(), weight.tolist(), strict=True):
            expected -= value * w / total / 3
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    assert logprobs[1].grad is not None
    torch.testing.assert_close(logprobs[1].grad, -weights[1] / 9.0)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="7 ids"):
        mtp_targets(torch.zeros(7, dtype=torch.int64), torch.zeros(7), [3, 3], 0)
    with pytest.raises(ValueError, match="one of each"):
        mtp_loss([], [], [])
