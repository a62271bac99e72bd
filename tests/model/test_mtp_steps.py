"""Multi-token prediction against a computation of its own: transformers has none.

The layer inside a step is transformers' decoder layer; what surrounds it is written out here.
"""

from typing import Any

import pytest
import torch
from latent_oracle import GrowingLatentCache, build, draw_ids
from torch import Tensor
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer

from headrace.model.causal import CausalAttend
from headrace.model.config import ModelConfig, MtpConfig
from headrace.model.decoder import Decoder
from headrace.model.trace import SelectionTrace

BATCH, TOKENS = 2, 18


def new_model(mtp: MtpConfig, case: str = "glm-index-share") -> tuple[Any, Decoder]:
    """A transformers model, for its config and rotary tables, and a decoder with random weights."""
    reference = build(case)
    config = ModelConfig.from_hf({**reference.config.to_dict(), "num_nextn_predict_layers": 1})
    model = Decoder(ModelConfig(**{**vars(config), "mtp": mtp}))
    model.init_weights(5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif parameter is not model.embed.weight:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                )
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return reference, model.eval()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def expected_steps(reference: Any, model: Decoder, hidden: Tensor, ids: Tensor) -> list[Tensor]:
    """Hidden states of every step; at step s the last s + 1 positions have no token to join."""
    mtp, eps, layers = model.config.mtp, model.config.norm_eps, model.config.num_layers
    assert mtp is not None
    weights = model.hf_tensors()
    mask = torch.full((1, 1, TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    positions = torch.arange(TOKENS)[None]
    rotation = reference.model.rotary_emb(hidden, positions)
    selection, results = None, []
    for step in range(mtp.depth):
        own = 0 if mtp.shared else step
        prefix = f"model.layers.{layers + own}."
        part = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        layer = transformers_layer(reference, part)
        embedded = model.embed.weight[ids.roll(-(step + 1), 1)]
        joined = torch.cat(
            (
                rms_norm(embedded, part["enorm.weight"], eps),
                rms_norm(hidden, part["hnorm.weight"], eps),
            ),
            -1,
        )
        if mtp.shared and step:
            layer.self_attn.indexer = None
        else:
            selection = None
        hidden, selection = layer(
            joined @ part["eh_proj.weight"].T,
            attention_mask=mask,
            position_embeddings=rotation,
            position_ids=positions,
            prev_topk_indices=selection,
        )
        hidden = rms_norm(hidden, part["shared_head.norm.weight"], eps)
        results.append(hidden)
    return results


def transformers_layer(reference: Any, weights: dict[str, Tensor]) -> Any:
    """A sparse layer with an indexer, filled from per-expert tensors."""
    layer = GlmMoeDsaDecoderLayer(reference.config, 2).eval()
    experts = range(reference.config.n_routed_experts)

    def stacked(*names: str) -> Tensor:
        return torch.stack(
            [torch.cat([weights[f"mlp.experts.{e}.{n}.weight"] for n in names]) for e in experts]
        )

    state = {name: weights[name] for name in layer.state_dict() if name in weights}
    state["mlp.experts.gate_up_proj"] = stacked("gate_proj", "up_proj")
    state["mlp.experts.down_proj"] = stacked("down_proj")
    layer.load_state_dict(state)
    return layer


@torch.no_grad()
@pytest.mark.parametrize(
    "mtp",
    [
        MtpConfig(1, shared=True),
        MtpConfig(2, shared=True),
        MtpConfig(3, shared=True),
        MtpConfig(2, shared=False),
        MtpConfig(3, shared=False),
    ],
    ids=lambda mtp: f"{mtp.depth}-{'shared' if mtp.shared else 'apart'}",
)
def test_steps_equal_the_written_out_computation(mtp: MtpConfig) -> None:
    reference, model = new_model(mtp)
    ids, trace = draw_ids(BATCH, TOKENS), SelectionTrace()
    attend = CausalAttend(trace=trace)
    hidden = model(ids, attend=attend)
    expected = expected_steps(reference, model, hidden, ids)
    trace.selections.clear()
    for step in range(mtp.depth):
        hidden = model.mtp_forward(step, hidden, ids.roll(-(step + 1), 1), attend=attend)
        assert expected[step].std() > 0.3
        torch.testing.assert_close(hidden, expected[step], atol=1e-5, rtol=1e-5)
    # Only the first step of a set of parameters selects.
    layers = model.config.num_layers
    assert list(trace.selections) == [layers + step for step in range(mtp.stored_layers)]


@torch.no_grad()
def test_steps_with_a_cache_equal_steps_without() -> None:
    mtp = MtpConfig(3, shared=True)
    _, model = new_model(mtp)
    ids = draw_ids(BATCH, TOKENS)
    attend, cache = CausalAttend(), GrowingLatentCache()
    whole = [model(ids, attend=attend)]
    for step in range(mtp.depth):
        shifted = ids.roll(-(step + 1), 1)
        whole.append(model.mtp_forward(step, whole[-1], shifted, attend=attend))
    for start, end in ((0, 9), (9, 10), (10, TOKENS)):
        positions = torch.arange(start, end).expand(BATCH, end - start)
        hidden = model(ids[:, start:end], positions, cache)
        torch.testing.assert_close(hidden, whole[0][:, start:end], atol=1e-5, rtol=1e-5)
        for step in range(mtp.depth):
            shifted = ids.roll(-(step + 1), 1)[:, start:end]
            hidden = model.mtp_forward(step, hidden, shifted, positions, cache)
            torch.testing.assert_close(hidden, whole[step + 1][:, start:end], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_steps_beyond_the_trained_depth_use_the_last_layer_again() -> None:
    _, model = new_model(MtpConfig(2, shared=False))
    _, deeper = new_model(MtpConfig(3, shared=False))
    ids = draw_ids(BATCH, TOKENS)
    assert model.mtp is not None
    assert deeper.mtp is not None
    deeper.load_state_dict(model.state_dict(), strict=False)
    deeper.mtp.layers[2].load_state_dict(model.mtp.layers[1].state_dict())
    results = []
    for which in (model, deeper):
        attend, hidden = CausalAttend(mode="dense"), which(ids)
        for step in range(3):
            hidden = which.mtp_forward(step, hidden, ids, attend=attend)
        results.append(hidden)
    assert torch.equal(*results)


def test_every_parameter_learns_from_the_last_step() -> None:
    _, model = new_model(MtpConfig(2, shared=True))
    ids, attend = draw_ids(BATCH, TOKENS), CausalAttend()
    hidden = model(ids, attend=attend)
    for step in range(2):
        hidden = model.mtp_forward(step, hidden, ids.roll(-(step + 1), 1), attend=attend)
    model.logits(hidden).logsumexp(-1).sum().backward()
    assert model.mtp is not None
    for name, parameter in model.mtp.named_parameters():
        assert (parameter.grad is None) == (".indexer." in name), name


def test_a_model_without_prediction_layers_says_so() -> None:
    model = Decoder(ModelConfig(10, 8, 16, 1, 2, 1, 4))
    with pytest.raises(ValueError, match="no multi-token prediction layers"):
        model.mtp_forward(0, torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.long))
