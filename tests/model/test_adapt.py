"""Models under a changed config keep what they knew."""

import pytest
import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.model.adapt import extend_with_indexer
from headrace.model.causal import CausalAttend
from headrace.model.config import IndexerConfig, ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.presets import preset

INDEXER = IndexerConfig(num_heads=4, head_dim=16, topk=6, shared=(False, True, False))


def new_base() -> Decoder:
    config = preset(
        "glm5-tiny", 61, hidden_size=48, num_layers=3, indexer=None, max_positions=64,
        moe={"num_experts": 4, "intermediate_size": 16},
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(0)
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_extended_model_attending_densely_is_the_base(ids: Tensor) -> None:
    base = new_base()
    extended = extend_with_indexer(base, INDEXER, seed=3)
    assert extended.config.family == "glm_moe_dsa"
    dense = CausalAttend(mode="dense")
    hidden = extended(ids, attend=dense)
    assert torch.equal(hidden, base(ids))
    steps = extended.mtp_forward(0, hidden, ids, attend=dense), base.mtp_forward(0, hidden, ids)
    assert torch.equal(*steps)
    assert not torch.equal(extended(ids), hidden)

    names = {name for name, _ in extended.named_parameters()}
    fresh = names - {name for name, _ in base.named_parameters()}
    layers = {name.split(".attention.")[0] for name in fresh}
    assert layers == {"layers.0", "layers.2", "mtp.layers.0.block"}
    again, other = (extend_with_indexer(base, INDEXER, seed) for seed in (3, 4))
    for name in fresh:
        parameter = extended.get_parameter(name)
        assert torch.equal(parameter, again.get_parameter(name))
        if parameter.dim() > 1:
            assert not torch.equal(parameter, other.get_parameter(name))


@torch.no_grad()
def test_the_result_has_its_own_weights(ids: Tensor) -> None:
    base = new_base()
    before = base(ids)
    for parameter in extend_with_indexer(base, INDEXER, 0).parameters():
        parameter.zero_()
    assert torch.equal(base(ids), before)


@torch.no_grad()
def test_rope_changes_alone(ids: Tensor) -> None:
    model, base = new_base(), new_base()
    model.set_rope(max_positions=256)
    assert torch.equal(model(ids), base(ids))
    model(torch.zeros(1, 256, dtype=torch.long))
    model.set_rope(theta=1e6)
    assert (model.config.rope_theta, model.config.max_positions) == (1e6, 256)
    assert not torch.allclose(model(ids), base(ids))
    for a, b in zip(model.parameters(), base.parameters(), strict=True):
        assert torch.equal(a, b)


def test_refusals() -> None:
    llama = Decoder(ModelConfig(10, 8, 16, 1, 2, 1, 4), device="meta")
    with pytest.raises(UserError, match="needs latent attention"):
        extend_with_indexer(llama, INDEXER, 0)
    extended = extend_with_indexer(new_base(), INDEXER, 0)
    with pytest.raises(UserError, match="has an indexer already"):
        extend_with_indexer(extended, INDEXER, 0)
    with pytest.raises(UserError, match="max_positions = 0"):
        extended.set_rope(max_positions=0)
