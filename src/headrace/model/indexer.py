"""The lightning indexer: cheap scores that decide which keys a query attends to.

Its inputs are detached: it learns from its own objective only, and the language-model loss never
reaches it (selection has no gradient). Its head weights stay fp32, because rounding them to
bfloat16 flips picks.
Source: DeepSeek-V3.2, eq. 1; GLM-5, arXiv 2602.15763, section 2.1; transformers' `glm_moe_dsa`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headrace.model.attention import IndexQuery
from headrace.model.config import ModelConfig
from headrace.model.linear import new_linear
from headrace.model.rope import Rotation, rotate

_KEY_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Projects hidden states and query latents to what `IndexQuery` holds."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        indexer, latent = config.indexer, config.latent
        if indexer is None or latent is None:
            raise ValueError("Indexer needs config.indexer and config.latent")
        self.num_heads = indexer.num_heads
        self.head_dim = indexer.head_dim
        self.rope_dim = latent.rope_dim
        self.interleaved = indexer.rope_interleaved
        self.scale = (indexer.num_heads * indexer.head_dim) ** -0.5

        self.q_up = new_linear(
            latent.q_rank,
            indexer.num_heads * indexer.head_dim,
            bias=False,
            device=device,
            dtype=dtype,
        )
        self.key = new_linear(
            config.hidden_size, indexer.head_dim, bias=False, device=device, dtype=dtype
        )
        self.key_norm = nn.LayerNorm(
            indexer.head_dim, eps=_KEY_NORM_EPS, device=device, dtype=dtype
        )
        self.weights = new_linear(
            config.hidden_size, indexer.num_heads, bias=False, device=device, dtype=torch.float32
        )

    def forward(self, x: Tensor, q_latent: Tensor, rotation: Rotation) -> IndexQuery:
        """x [B, T, D] normed layer input, q_latent [B, T, q_rank]; both are detached here."""
        x, q_latent = x.detach(), q_latent.detach()
        rotation = rotation if self.interleaved else rotation.as_halves()
        q = self.q_up(q_latent).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.key_norm(self.key(x))
        with torch.autocast(x.device.type, enabled=False):
            weights = self.weights(x.float()) * self.scale
        return IndexQuery(
            q=self._rotate_first(q, rotation),
            k=self._rotate_first(k.unsqueeze(2), rotation).squeeze(2),
            weights=weights,
        )

    def _rotate_first(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the first `rope_dim` dimensions of [B, T, h, di]."""
        turned = rotate(x[..., : self.rope_dim], rotation)
        return torch.cat((turned, x[..., self.rope_dim :]), dim=-1)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name below "indexer." and view into the parameters, for every Hugging Face tensor."""
        yield "wq_b.weight", self.q_up.weight.detach()
        yield "wk.weight", self.key.weight.detach()
        yield "k_norm.weight", self.key_norm.weight.detach()
        yield "k_norm.bias", self.key_norm.bias.detach()
        yield "weights_proj.weight", self.weights.weight.detach()
