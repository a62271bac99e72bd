"""The door through which somebody else owns keys and values, and grouped-query attention.

An attention module projects, normalises and rotates; an `Attend` does the rest. With none given,
attention is causal over exactly the tokens of the call; an engine passes its own, backed by a
cache, and the model never learns where keys and values live.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headrace.model.config import ModelConfig
from headrace.model.linear import new_linear
from headrace.model.norm import RMSNorm
from headrace.model.rope import rotate
from headrace.model.step import Step


class IndexQuery(NamedTuple):
    """What the lightning indexer of one layer makes of the new tokens.

    The score of key j for query t is the sum over heads h of weights[t, h] * relu(q[t, h] . k[j]).

    Attributes:
        q: [B, T, HI, di], rotated.
        k: [B, T, di], normalised and rotated.
        weights: [B, T, HI] fp32 with all scale factors folded in.
    """

    q: Tensor
    k: Tensor
    weights: Tensor


class LatentQuery(NamedTuple):
    """What a latent-attention layer makes of the new tokens.

    Attributes:
        q_nope: [B, T, H, dn], the part of the queries that is not rotated.
        q_rope: [B, T, H, dr], the rotated part.
        latent: [B, T, R], normalised key/value latents.
        k_rope: [B, T, dr], rotated keys that all heads share.
        w_uk: [H, dn, R], keys from latents: k_nope = w_uk @ latent.
        w_uv: [H, dv, R], values from latents.
        scale: of the scores q . k.
        index: None when this layer has no indexer.
        shares: attend over the selection of the last layer that made one.
        topk: keys to select; None when the model has no indexer, and attention is dense.
    """

    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor
    scale: float
    index: IndexQuery | None
    shares: bool
    topk: int | None


class Attend(Protocol):
    """Owner of keys and values. One object serves one kind of attention, or both."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend for the new tokens of one layer.

        Called once per layer per forward, layers in ascending order.

        Args:
            layer: 0-based layer index.
            q: [B, H, T, d], rotated queries of the new tokens. Strided view, not contiguous.
            k: [B, Hkv, T, d], their rotated keys. Strided view; copy what must outlive the call.
            v: [B, Hkv, T, d], their values. Likewise.

        Returns:
            [B, H, T, d], the attention output before the output projection.
        """
        ...

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        """Attend for the new tokens of one latent-attention layer.

        Args:
            layer: 0-based layer index; multi-token prediction step s is `num_layers + s`.
            query: see `LatentQuery`; tensors may be strided views.

        Returns:
            [B, T, H, dv], the attention output before the output projection.
        """
        ...


class GroupedQueryAttention(nn.Module):
    """Multi-head attention whose H query heads share Hkv key/value heads.

    Source: Ainslie et al., GQA, arXiv 2305.13245. Queries, keys and values are one projection
    `qkv` with rows in the order q heads, k heads, v heads.
    """

    hf_prefix = "self_attn"

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        width = config.num_heads * config.head_dim
        bias = config.attention_bias
        self.qkv = new_linear(config.hidden_size, rows, bias=bias, device=device, dtype=dtype)
        self.output = new_linear(width, config.hidden_size, bias=bias, device=device, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, device=device, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        batch, tokens, _ = x.shape
        heads, kv_heads = self.num_heads, self.num_kv_heads
        # Queries and keys stay one tensor through the rotation: half the operations per layer.
        qk, v = (
            self.qkv(x)
            .view(batch, tokens, heads + 2 * kv_heads, self.head_dim)
            .split((heads + kv_heads, kv_heads), dim=2)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        q, k = rotate(qk, step.rotation).split((heads, kv_heads), dim=2)
        out = step.attend.attend(
            self.layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        return self.output(out.transpose(1, 2).reshape(batch, tokens, heads * self.head_dim))

    def residual_outputs(self) -> Iterator[Tensor]:
        """Weights whose output is added to the residual stream (initialised smaller)."""
        yield self.output.weight

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name below `hf_prefix` and view into the parameters, for every Hugging Face tensor."""
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        names = ("q_proj", "k_proj", "v_proj")
        yield from zip(
            (f"{name}.weight" for name in names), self.qkv.weight.detach().split(sizes), strict=True
        )
        yield "o_proj.weight", self.output.weight.detach()
        if self.qkv.bias is not None:
            yield from zip(
                (f"{name}.bias" for name in names), self.qkv.bias.detach().split(sizes), strict=True
            )
            yield "o_proj.bias", self.output.bias.detach()
        if self.q_norm is not None and self.k_norm is not None:
            yield "q_norm.weight", self.q_norm.weight.detach()
            yield "k_norm.weight", self.k_norm.weight.detach()
