"""The decoder against transformers on the same weights, and the doors other rooms use."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.model import parts
from headrace.model.checkpoint import load_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.feed_forward import SwiGLU
from headrace.model.rope import Rotation, rotary_tables, rotate

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)


class GrowingCache:
    """Keys and values of every layer so far; attends the new tokens to all of them."""

    def __init__(self, layers: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = sum(piece.shape[2] for piece in self.keys[layer])
        self.keys[layer].append(k.clone())
        self.values[layer].append(v.clone())
        keys, values = torch.cat(self.keys[layer], 2), torch.cat(self.values[layer], 2)
        new = torch.arange(q.shape[2])[:, None] + past
        mask = new >= torch.arange(keys.shape[2])[None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


@torch.no_grad()
def test_logits_equal_transformers(reference: Any, tmp_path: Path, ids: Tensor) -> None:
    reference.save_pretrained(tmp_path)
    model = load_checkpoint(tmp_path)
    expected = reference(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(model.logits(model(ids)), expected, atol=1e-4, rtol=0)
    assert model.num_parameters() == reference.num_parameters()


def test_gradients_equal_transformers(
    make_reference: Callable[..., Any], tmp_path: Path, ids: Tensor
) -> None:
    reference = make_reference("qwen3-tied")
    reference.save_pretrained(tmp_path)
    model = load_checkpoint(tmp_path)
    targets = ids.roll(-1, 1).flatten()
    F.cross_entropy(reference(ids).logits.flatten(0, 1), targets).backward()
    F.cross_entropy(model.logits(model(ids)).flatten(0, 1), targets).backward()

    # The gradient takes the place of the weights, so that it too is read by Hugging Face names.
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = gradients[name]
            assert gradient is not None
            # A gradient laid out otherwise than its weight would be copied every step.
            assert gradient.stride() == parameter.stride()
            parameter.copy_(gradient)
    views = model.hf_tensors()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(views[name], parameter.grad, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 4, 2]])
def test_cached_attend_equals_full_forward(pieces: list[int]) -> None:
    model = Decoder(CONFIG)
    model.init_weights(3)
    ids = torch.randint(0, CONFIG.vocab_size, (2, sum(pieces)))
    cache, start, hidden = GrowingCache(CONFIG.num_layers), 0, []
    for size in pieces:
        positions = torch.arange(start, start + size).expand(2, size)
        hidden.append(model(ids[:, start : start + size], positions, cache))
        start += size
    torch.testing.assert_close(torch.cat(hidden, 1), model(ids), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_positions_are_per_row_and_relative(ids: Tensor) -> None:
    model = Decoder(CONFIG)
    model.init_weights(3)
    plain = model(ids)
    shifted = torch.arange(ids.shape[1]) + torch.tensor([[0], [20]])
    torch.testing.assert_close(model(ids, shifted), plain, atol=1e-4, rtol=1e-4)
    stretched = torch.arange(ids.shape[1]).expand(2, -1) * torch.tensor([[1], [0]])
    out = model(ids, stretched)
    torch.testing.assert_close(out[0], plain[0])
    assert (out[1] - plain[1]).abs().max() > 1e-2


@torch.no_grad()
def test_bf16_is_near_fp32(ids: Tensor) -> None:
    model = Decoder(CONFIG)
    model.init_weights(3)
    small = Decoder(CONFIG, dtype=torch.bfloat16)
    small.load_state_dict(model.state_dict())
    out = small(ids)
    assert out.dtype == torch.bfloat16
    assert (out.float() - model(ids)).abs().mean() < 0.03


def test_autocast_trains(ids: Tensor) -> None:
    model = Decoder(CONFIG)
    model.init_weights(3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.logits(model(ids)).float().logsumexp(-1).mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_init_is_reproducible_and_scaled(ids: Tensor) -> None:
    first, again, other = Decoder(CONFIG), Decoder(CONFIG), Decoder(CONFIG)
    before = torch.random.get_rng_state()
    first.init_weights(7)
    again.init_weights(7)
    other.init_weights(8)
    assert torch.equal(before, torch.random.get_rng_state())
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    # A fresh model predicts nearly uniformly: its loss is log V.
    with torch.no_grad():
        loss = F.cross_entropy(first.logits(first(ids)).flatten(0, 1), ids.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(CONFIG.vocab_size), abs=0.1)


def test_too_many_tokens_is_refused() -> None:
    model = Decoder(CONFIG)
    model.init_weights(0)
    with pytest.raises(ValueError, match="65 tokens exceed max_positions 64"):
        model(torch.zeros(1, 65, dtype=torch.long))


def test_interleaved_rotation_is_complex_multiplication() -> None:
    config = replace(CONFIG, rope_interleaved=True, rope_theta=50.0)
    cos, sin = rotary_tables(config, device=None, dtype=torch.float32)
    x = torch.randn(2, 64, 3, 8, generator=torch.Generator().manual_seed(0))
    out = rotate(x, Rotation(cos[None, :, None], sin[None, :, None], interleaved=True))
    step = 50.0 ** (-torch.arange(0, 8, 2) / 8)
    angles = torch.arange(64)[:, None] * step
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    torch.testing.assert_close(out, torch.view_as_real(turned).flatten(-2))


def test_a_kind_needs_only_a_table_entry(monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    class DenseThenHalf(SwiGLU):
        """A kind that differs between layers."""

        def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
            inner = config.intermediate_size // (2 if layer else 1)
            super().__init__(config, layer, inner=inner, **where)

    monkeypatch.setitem(parts.FEED_FORWARD, "swiglu", DenseThenHalf)
    model = Decoder(CONFIG)
    model.init_weights(0)
    assert model(ids).shape == (2, 40, 48)
    views = model.hf_tensors()
    assert views["model.layers.0.mlp.down_proj.weight"].shape == (48, 80)
    assert views["model.layers.2.mlp.down_proj.weight"].shape == (48, 40)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="kind 'mamba' is unknown; use one of gqa, mla"):
        parts.build_part(parts.ATTENTION, "mamba", CONFIG, 0, device=None, dtype=None)


def test_meta_device_holds_no_memory() -> None:
    model = Decoder(replace(CONFIG, hidden_size=48 * 1000), device="meta")
    assert all(isinstance(p, nn.Parameter) and p.is_meta for p in model.parameters())
