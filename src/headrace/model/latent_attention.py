"""Multi-latent attention: queries and keys/values through low-rank latents.

What a cache has to hold of a token is one latent of width R and one rotated key of width dr,
whatever the number of heads. Rows of `kv_up` are per head: dn rows of W_UK, then dv rows of W_UV.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; GLM-5, arXiv 2602.15763, section 2.1 (MLA-256);
checked against transformers' `glm_moe_dsa`, `deepseek_v32` and `deepseek_v3`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headrace.model.attention import LatentQuery
from headrace.model.config import ModelConfig
from headrace.model.indexer import Indexer
from headrace.model.linear import new_linear
from headrace.model.norm import RMSNorm
from headrace.model.rope import rotate
from headrace.model.step import Step


class LatentAttention(nn.Module):
    """MLA, with a lightning indexer where the config says so."""

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
        latent = config.latent
        if latent is None:
            raise ValueError("LatentAttention needs config.latent")
        self.layer = layer
        self.num_heads = config.num_heads
        self.latent = latent
        self.topk = None if config.indexer is None else config.indexer.topk
        self.scale = (latent.nope_dim + latent.rope_dim) ** -0.5
        size, heads = config.hidden_size, config.num_heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return new_linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.q_down = linear(size, latent.q_rank)
        self.q_norm = RMSNorm(latent.q_rank, latent.norm_eps, device=device, dtype=dtype)
        self.q_up = linear(latent.q_rank, heads * (latent.nope_dim + latent.rope_dim))
        self.kv_down = linear(size, latent.kv_rank + latent.rope_dim)
        self.kv_norm = RMSNorm(latent.kv_rank, latent.norm_eps, device=device, dtype=dtype)
        self.kv_up = linear(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim))
        self.output = linear(heads * latent.value_dim, size)
        self.indexer: Indexer | None = None
        if config.indexer is not None and not config.shares_selection(layer):
            self.indexer = Indexer(config, device=device, dtype=dtype)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        latent, heads = self.latent, self.num_heads
        batch, tokens, _ = x.shape
        q_latent = self.q_norm(self.q_down(x))
        q = self.q_up(q_latent).view(batch, tokens, heads, latent.nope_dim + latent.rope_dim)
        q_nope, q_rope = q.split((latent.nope_dim, latent.rope_dim), dim=-1)
        kv, k_rope = self.kv_down(x).split((latent.kv_rank, latent.rope_dim), dim=-1)
        w_uk, w_uv = self.up_projections()
        index = None
        if self.indexer is not None and step.offset == 0:
            index = self.indexer(x, q_latent, step.rotation)
        out = step.attend.attend_latent(
            self.layer + step.offset,
            LatentQuery(
                q_nope=q_nope,
                q_rope=rotate(q_rope, step.rotation),
                latent=self.kv_norm(kv),
                k_rope=rotate(k_rope.unsqueeze(2), step.rotation).squeeze(2),
                w_uk=w_uk,
                w_uv=w_uv,
                scale=self.scale,
                index=index,
                shares=index is None and self.topk is not None,
                topk=self.topk,
            ),
        )
        return self.output(out.reshape(batch, tokens, heads * latent.value_dim))

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, dn, R] and W_UV [H, dv, R], views of `kv_up`."""
        keys, values = self.kv_up.weight.view(self.num_heads, -1, self.latent.kv_rank).split(
            (self.latent.nope_dim, self.latent.value_dim), dim=1
        )
        return keys, values

    def residual_outputs(self) -> Iterator[Tensor]:
        """Weights whose output is added to the residual stream (initialised smaller)."""
        yield self.output.weight

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name below `hf_prefix` and view into the parameters, for every Hugging Face tensor."""
        yield "q_a_proj.weight", self.q_down.weight.detach()
        yield "q_a_layernorm.weight", self.q_norm.weight.detach()
        yield "q_b_proj.weight", self.q_up.weight.detach()
        yield "kv_a_proj_with_mqa.weight", self.kv_down.weight.detach()
        yield "kv_a_layernorm.weight", self.kv_norm.weight.detach()
        yield "kv_b_proj.weight", self.kv_up.weight.detach()
        yield "o_proj.weight", self.output.weight.detach()
        if self.indexer is not None:
            for name, view in self.indexer.hf_tensors():
                yield f"indexer.{name}", view
