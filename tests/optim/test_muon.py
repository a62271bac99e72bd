"""Muon: orthogonal updates block by block, in batches, with state that continues exactly."""

import copy

import pytest
import torch
from torch import nn

from headrace.optim.blocks import MatrixParameter, RowSplit
from headrace.optim.muon import Muon
from headrace.optim.newton_schulz import COEFFICIENTS, STEPS, orthogonalise, resolve_precision


def exact_update(matrix):
    """The iteration's polynomial applied to the singular values of one matrix, in float64."""
    u, values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5
    return (u * values) @ vh


def blocks_by_hand(matrix, split):
    """The row indices of every block, written out as loops."""
    run = sum(split.rows)
    by_role, start = [], 0
    for rows in split.rows:
        places = [list(range(g * run + start, g * run + start + rows)) for g in range(split.groups)]
        by_role += [[row for place in places for row in place]] if split.joined else places
        start += rows
    return by_role


SPLITS = {
    "one": ((24, 16), RowSplit((24,))),
    "roles": ((24, 16), RowSplit((8, 12, 4))),
    "heads": ((24, 16), RowSplit((6,), 4)),
    "heads and roles": ((24, 16), RowSplit((5, 3), 3)),
    "joined roles": ((24, 16), RowSplit((5, 3), 3, joined=True)),
    "experts": ((3, 10, 16), RowSplit((5, 5))),
}


def step_once(shape, split, gradient, **options):
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient.clone()
    Muon([MatrixParameter(parameter, split)], 1.0, **options).step()
    return parameter.detach()


def test_singular_values_end_near_one_for_wide_and_tall():
    generator = torch.Generator().manual_seed(0)
    for shape in [(3, 16, 40), (2, 40, 16)]:
        result = orthogonalise(torch.randn(shape, generator=generator))
        values = torch.linalg.svdvals(result)
        assert result.shape == shape
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_a_batch_equals_one_matrix_at_a_time_and_zero_stays_zero():
    matrices = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(1))
    matrices[2] = 0
    single = torch.cat([orthogonalise(m[None]) for m in matrices])
    torch.testing.assert_close(orthogonalise(matrices), single)
    assert not orthogonalise(matrices)[2].any()


@pytest.mark.parametrize("name", SPLITS)
def test_every_block_is_updated_as_if_alone(name):
    """Against the float64 polynomial of each block, rows picked by hand."""
    shape, split = SPLITS[name]
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    # Blocks of very different size: sharing a spectrum would leave the small ones untouched.
    gradient *= torch.logspace(0, -4, shape[-2])[:, None]
    moved = step_once(shape, split, gradient, precision="float32")
    for matrix, result in zip(
        gradient.reshape(-1, *shape[-2:]), moved.view(-1, *shape[-2:]), strict=True
    ):
        for rows in blocks_by_hand(matrix, split):
            scale = 0.2 * max(len(rows), shape[-1]) ** 0.5
            # Nesterov: what the first step orthogonalises is parallel to the gradient.
            wanted = -scale * exact_update(matrix[rows])
            torch.testing.assert_close(result[rows].double(), wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", SPLITS)
def test_small_scratch_changes_nothing(name):
    shape, split = SPLITS[name]
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    whole = step_once(shape, split, gradient, precision="float32")
    for elements in (1, 200):
        chunked = step_once(shape, split, gradient, precision="float32", scratch_elements=elements)
        torch.testing.assert_close(chunked, whole)


def test_scratch_is_bounded(monkeypatch):
    sizes = []

    def spy(matrices):
        sizes.append(matrices.numel())
        return orthogonalise(matrices)

    monkeypatch.setattr("headrace.optim.updates.orthogonalise", spy)
    gradient = torch.ones(6, 8, 10)
    step_once((6, 8, 10), RowSplit((4, 4)), gradient, scratch_elements=100)
    assert sizes == [80] * 6  # two blocks of 40 numbers at a time


def test_an_unsplit_step_equals_torchs_own_muon():
    """torch.optim.Muon orthogonalises in bfloat16, hence the tolerance."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(24, 16, generator=generator)
    ours, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    split = RowSplit((24,))
    mine = Muon([MatrixParameter(ours, split)], 0.1, weight_decay=0.01, precision="float32")
    reference = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        gradient = torch.randn(24, 16, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    moved = (theirs - weights).norm()
    assert (ours - theirs).norm() < 0.03 * moved


def test_split_blocks_equal_torchs_muon_on_each_block():
    """The same precision, so the only difference is one batch against a loop."""
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(32, 24, generator=generator)
    ours = nn.Parameter(weights.clone())
    theirs = [nn.Parameter(block.clone()) for block in weights.split(8)]
    mine = Muon([MatrixParameter(ours, RowSplit((8,), 4))], 0.1, precision="bfloat16")
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(32, 24, generator=generator)
        for block, gradient in zip(theirs, ours.grad.split(8), strict=True):
            block.grad = gradient.clone()
        mine.step()
        reference.step()
    looped = torch.cat([block.detach() for block in theirs])
    assert (ours - looped).norm() < 0.01 * (looped - weights).norm()


def test_memory_order_of_the_weight_does_not_matter():
    gradient = torch.randn(12, 8, generator=torch.Generator().manual_seed(5))
    split = RowSplit((4, 2), 2)
    usual = step_once((12, 8), split, gradient)
    parameter = nn.Parameter(torch.zeros(8, 12).t())
    parameter.grad = gradient.clone()
    Muon([MatrixParameter(parameter, split)], 1.0).step()
    assert torch.equal(parameter, usual)


def test_the_update_has_the_size_of_an_adamw_step():
    gradient = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    moved = step_once((64, 256), RowSplit((64,)), gradient)
    assert 0.15 < moved.square().mean().sqrt() < 0.25


def test_a_parameter_without_gradient_stays_as_it_is():
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([MatrixParameter(parameter, RowSplit((4,)))], 0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(4, 4))
    assert not optimizer.state


def test_a_restored_optimizer_continues_to_the_bit():
    def fresh():
        parameter = nn.Parameter(torch.ones(4, 4))
        return parameter, Muon([MatrixParameter(parameter, RowSplit((2,), 2))], 0.1)

    generator = torch.Generator().manual_seed(4)
    first, second = (torch.randn(4, 4, generator=generator) for _ in range(2))
    a, optimizer = fresh()
    a.grad = first
    optimizer.step()
    b, restored = fresh()
    b.data.copy_(a.data)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, opt in ((a, optimizer), (b, restored)):
        parameter.grad = second
        opt.step()
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("shape", "split"),
    [((4, 4), RowSplit((3,))), ((4,), RowSplit((4,))), ((2, 4, 4), RowSplit((2,), 2))],
)
def test_rows_that_do_not_fit_are_refused(shape, split):
    with pytest.raises(ValueError, match="cannot be split"):
        Muon([MatrixParameter(nn.Parameter(torch.ones(shape)), split)], 0.1)


def test_precision_is_as_asked_and_float32_where_bfloat16_is_slow(monkeypatch):
    cpu = torch.device("cpu")
    assert resolve_precision("float32", cpu) == torch.float32
    assert resolve_precision("bfloat16", cpu) == torch.bfloat16
    for amx, wanted in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr("headrace.optim.newton_schulz._cpu_has_amx", lambda amx=amx: amx)
        assert resolve_precision("auto", cpu) == wanted
