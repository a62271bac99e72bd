"""The one decoder: embedding, blocks of attention and feed-forward, final norm, output projection.

It maps token ids to hidden states and hidden states to logits. The config chooses its attention and
feed-forward through `parts`; where keys and values live is the caller's business (`Attend`).
Projections that read the same input are stored fused; `hf_tensors` splits them.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.model.attention import Attend, CausalAttend
from headrace.model.config import ModelConfig
from headrace.model.linear import new_embedding, new_linear
from headrace.model.norm import RMSNorm
from headrace.model.parts import (
    ATTENTION,
    FEED_FORWARD,
    AttentionPart,
    FeedForwardPart,
    Part,
    build_part,
)
from headrace.model.rope import Rotation, rotary_tables

__all__ = ["Attend", "Block", "CausalAttend", "Decoder"]

_CAUSAL = CausalAttend()
_EMBEDDING_STD = 0.02


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.attention = build_part(
            ATTENTION, "attention", config, layer, device=device, dtype=dtype
        )
        self.feed_forward_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.feed_forward = build_part(
            FEED_FORWARD, "feed_forward", config, layer, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        attention = cast(AttentionPart, self.attention)
        feed_forward = cast(FeedForwardPart, self.feed_forward)
        x = x + attention(self.attention_norm(x), rotation, attend)
        return x + feed_forward(self.feed_forward_norm(x))

    def parts(self) -> tuple[Part, Part]:
        """Attention and feed-forward."""
        return cast(Part, self.attention), cast(Part, self.feed_forward)


class Decoder(nn.Module):
    """A causal language model.

    Parameters hold no values after construction: call `init_weights`, or use
    `checkpoint.load_checkpoint`.

    Args:
        config: the architecture.
        device: where parameters live; None is torch's default device.
        dtype: of parameters and activations; None is torch's default dtype.

    Raises:
        UserError: the config names an unknown attention or feed-forward kind.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = new_embedding(
            config.vocab_size, config.hidden_size, device=device, dtype=dtype
        )
        self.layers = nn.ModuleList(
            Block(config, layer, device=device, dtype=dtype) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, device=device, dtype=dtype)
        self.lm_head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.lm_head = new_linear(
                config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype
            )
        cos, sin = rotary_tables(config, device=device, dtype=dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, attend: Attend | None = None
    ) -> Tensor:
        """Hidden states of the given tokens after the final norm.

        Args:
            ids: [B, T], int64, each in [0, V).
            positions: [B, T], int64, each in [0, max_positions); None is 0 .. T-1 in every row.
                They set the rotation only; which tokens see which is up to `attend`.
            attend: owner of keys and values; None is causal attention over these tokens alone.

        Returns:
            [B, T, D].

        Raises:
            ValueError: positions is None and T exceeds max_positions.
        """
        x = self.embed(ids)
        rotation = self._rotation(ids.shape[1], positions)
        attend = attend or _CAUSAL
        for block in self.layers:
            x = block(x, rotation, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output projection: hidden [..., D] -> logits [..., V], same dtype."""
        if self.lm_head is None:
            return F.linear(hidden, self.embed.weight)
        return self.lm_head(hidden)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill all parameters with random values that depend on config and `seed` only.

        Embedding and output projection are normal with std 0.02, other matrices normal with std
        1 / sqrt(inputs), and matrices that write to the residual stream are smaller by
        sqrt(2 * layers) so that its variance does not grow with depth. Norms are 1, biases 0.
        Values are drawn on the CPU in fp32, so they are the same on every device.
        """
        generator = torch.Generator().manual_seed(seed)
        outputs = {
            id(weight)
            for block in self._blocks()
            for part in block.parts()
            for weight in part.residual_outputs()
        }
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                if parameter is self.embed.weight or name == "lm_head.weight":
                    std = _EMBEDDING_STD
                else:
                    std = 1 / math.sqrt(parameter.shape[-1])
                if id(parameter) in outputs:
                    std /= math.sqrt(2 * self.config.num_layers)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def num_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def hf_tensors(self) -> dict[str, Tensor]:
        """Every weight under its Hugging Face name, detached, sharing this model's memory.

        Fused projections appear as their pieces: writing to a piece writes to the parameter.
        """
        tensors = {
            "model.embed_tokens.weight": self.embed.weight.detach(),
            "model.norm.weight": self.norm.weight.detach(),
        }
        if self.lm_head is not None:
            tensors["lm_head.weight"] = self.lm_head.weight.detach()
        for index, block in enumerate(self._blocks()):
            prefix = f"model.layers.{index}"
            tensors[f"{prefix}.input_layernorm.weight"] = block.attention_norm.weight.detach()
            tensors[f"{prefix}.post_attention_layernorm.weight"] = (
                block.feed_forward_norm.weight.detach()
            )
            for part in block.parts():
                for name, view in part.hf_tensors():
                    tensors[f"{prefix}.{part.hf_prefix}.{name}"] = view
        return tensors

    def _rotation(self, tokens: int, positions: Tensor | None) -> Rotation:
        if positions is not None:
            cos, sin = F.embedding(positions, self.cos), F.embedding(positions, self.sin)
        elif tokens <= self.config.max_positions:
            cos, sin = self.cos[None, :tokens], self.sin[None, :tokens]
        else:
            raise ValueError(f"{tokens} tokens exceed max_positions {self.config.max_positions}")
        return Rotation(cos.unsqueeze(2), sin.unsqueeze(2), self.config.rope_interleaved)

    def _blocks(self) -> Iterator[Block]:
        return (cast(Block, block) for block in self.layers)
