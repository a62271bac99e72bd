"""Muon: orthogonal updates, fused blocks split, state restored."""

import copy

import pytest
import torch
from torch import nn

from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.optim.muon import Muon, matrix_blocks, orthogonalise


def test_singular_values_end_near_one_for_wide_and_tall():
    generator = torch.Generator().manual_seed(0)
    for shape in [(3, 16, 40), (2, 40, 16)]:
        result = orthogonalise(torch.randn(shape, generator=generator))
        values = torch.linalg.svdvals(result)
        assert result.shape == shape
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_a_batch_equals_one_matrix_at_a_time():
    matrices = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(1))
    single = torch.cat([orthogonalise(m[None]) for m in matrices])
    torch.testing.assert_close(orthogonalise(matrices), single)


def test_an_unsplit_step_equals_torchs_own_muon():
    """torch.optim.Muon orthogonalises in bfloat16, hence the tolerance."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(24, 16, generator=generator)
    ours, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    mine = Muon([(ours, [24])], 0.1, weight_decay=0.01)
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


def test_blocks_are_orthogonalised_for_themselves():
    weights = torch.zeros(8, 4)
    parameter = nn.Parameter(weights.clone())
    gradient = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    gradient[4:] *= 1e-3  # a fused step would leave this block almost untouched
    parameter.grad = gradient
    Muon([(parameter, [4, 4])], 1.0).step()
    for block in parameter.detach().split(4):
        assert torch.linalg.svdvals(block / (0.2 * 2)).min() > 0.3


def test_a_decoder_gives_its_matrices_split_and_nothing_else():
    model = Decoder(
        ModelConfig(
            vocab_size=30,
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=4,
            tie_embeddings=True,
        )
    )
    model.init_weights(0)
    blocks = matrix_blocks(model)
    assert sorted(rows for _, rows in blocks) == sorted([[16, 8, 8], [16], [24, 24], [16]] * 2)
    embedding = dict(model.named_parameters())["embed.weight"]
    assert all(parameter is not embedding for parameter, _ in blocks)


def test_state_survives_a_round_trip():
    def fresh():
        parameter = nn.Parameter(torch.ones(4, 4))
        return parameter, Muon([(parameter, [4])], 0.1)

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


def test_rows_that_do_not_fit_are_refused():
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    optimizer = Muon([(parameter, [3])], 0.1)
    with pytest.raises(RuntimeError, match="split"):
        optimizer.step()
