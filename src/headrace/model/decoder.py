"""The one decoder: embedding, blocks of attention and feed-forward, final norm, output projection.

It maps token ids to hidden states and hidden states to logits. The config chooses its attention and
feed-forward through `parts`; where keys and values live is the caller's business (`Attend`).
Projections that read the same input are stored fused; `hf_tensors` splits them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.model.attention import Attend
from headrace.model.block import Block
from headrace.model.causal import CausalAttend
from headrace.model.config import ModelConfig
from headrace.model.linear import new_embedding, new_linear
from headrace.model.mtp import Mtp
from headrace.model.norm import RMSNorm
from headrace.model.rope import Rotation, rotary_tables
from headrace.model.step import Step
from headrace.model.trace import Trace

_EMBEDDING_STD = 0.02


class Decoder(nn.Module):
    """A causal language model.

    Parameters hold no values after construction: call `init_weights`, or use
    `checkpoint.load_checkpoint`.

    Args:
        config: the architecture.
        device: where parameters live; None is torch's default device.
        dtype: of parameters and activations; None is torch's default dtype. Routers and the
            indexer's head weights are fp32 always.
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
        self.mtp = None if config.mtp is None else Mtp(config, device=device, dtype=dtype)
        self.lm_head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.lm_head = new_linear(
                config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype
            )
        cos, sin = rotary_tables(config, device=device, dtype=dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Hidden states of the given tokens after the final norm.

        Args:
            ids: [B, T], int64, each in [0, V).
            positions: [B, T], int64, each in [0, max_positions); None is 0 .. T-1 in every row.
                They set the rotation only; which tokens see which is up to `attend`.
            attend: owner of keys and values; None is causal attention over these tokens alone.
            trace: told what happens inside the layers.

        Returns:
            [B, T, D].

        Raises:
            ValueError: positions is None and T exceeds max_positions.
        """
        x = self.embed(ids)
        step = self._step(ids.shape[1], positions, attend, trace)
        for block in self.layers:
            x = block(x, step)
        return self.norm(x)

    def mtp_forward(
        self,
        index: int,
        hidden: Tensor,
        next_ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """One step of multi-token prediction.

        Args:
            index: step, >= 0. Steps beyond the trained depth use the last layer again.
            hidden: [B, T, D], what `forward` (step 0) or the step before returned.
            next_ids: [B, T], token t + index + 1 at position t.
            positions, attend, trace: as in `forward`. The same attend object must serve the steps
                of one chain, in order: later ones share the first one's selection.

        Returns:
            [B, T, D]; through `logits` it predicts token t + index + 2.

        Raises:
            ValueError: the model has no prediction layers.
        """
        if self.mtp is None:
            raise ValueError("mtp_forward: the model has no multi-token prediction layers")
        step = self._step(next_ids.shape[1], positions, attend, trace)
        return self.mtp(index, hidden, self.embed(next_ids), step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output projection: hidden [..., D] -> logits [..., V], same dtype."""
        return F.linear(hidden, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """The output projection's matrix, [V, D]."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self, seed: int, only: Callable[[str], bool] | None = None) -> None:
        """Fill parameters with random values that depend on config and `seed` only.

        Embedding and output projection are normal with std 0.02, other matrices normal with std
        1 / sqrt(inputs), and matrices that write to the residual stream are smaller by
        sqrt(2 * layers) so that its variance does not grow with depth. Norms are 1, biases 0.
        Values are drawn on the CPU in fp32, so they are the same on every device.

        Args:
            seed: of the values.
            only: says by name which parameters and buffers to fill; None is all. The others stay.
        """
        generator = torch.Generator().manual_seed(seed)
        outputs = {
            id(weight)
            for block in self._blocks()
            for part in block.parts()
            for weight in part.residual_outputs()
        }
        for name, parameter in self.named_parameters():
            if only is None or only(name):
                self._fill(name, parameter, generator, residual=id(parameter) in outputs)
        for name, buffer in self.named_buffers():
            if name.endswith("router.bias") and (only is None or only(name)):
                buffer.zero_()

    def _fill(
        self, name: str, parameter: Tensor, generator: torch.Generator, *, residual: bool
    ) -> None:
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            if parameter is self.embed.weight or name == "lm_head.weight":
                std = _EMBEDDING_STD
            else:
                std = 1 / math.sqrt(parameter.shape[-1])
            if residual:
                std /= math.sqrt(2 * self.config.num_layers)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def set_rope(self, *, theta: float | None = None, max_positions: int | None = None) -> None:
        """Change the rotary base or the number of positions in place; weights stay as they are.

        Args:
            theta, max_positions: new values; None keeps the old.

        Raises:
            UserError: a value is not positive.
        """
        changes = {"rope_theta": theta, "max_positions": max_positions}
        self.config = replace(self.config, **{k: v for k, v in changes.items() if v is not None})
        self.cos, self.sin = rotary_tables(
            self.config, device=self.cos.device, dtype=self.cos.dtype
        )

    def num_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def hf_tensors(self) -> dict[str, Tensor]:
        """Every weight under its Hugging Face name, detached, sharing this model's memory.

        Fused projections appear as their pieces: writing to a piece writes to the parameter.
        Prediction layers follow the main ones, as in released checkpoints.
        """
        tensors = {
            "model.embed_tokens.weight": self.embed.weight.detach(),
            "model.norm.weight": self.norm.weight.detach(),
        }
        if self.lm_head is not None:
            tensors["lm_head.weight"] = self.lm_head.weight.detach()
        layers = [cast(Block, block) for block in self.layers]
        stored = [] if self.mtp is None else list(self.mtp.stored())
        for index, layer in enumerate([*layers, *stored]):
            for name, view in layer.hf_tensors():
                tensors[f"model.layers.{index}.{name}"] = view
        return tensors

    def _step(
        self, tokens: int, positions: Tensor | None, attend: Attend | None, trace: Trace | None
    ) -> Step:
        if positions is not None:
            cos, sin = F.embedding(positions, self.cos), F.embedding(positions, self.sin)
        elif tokens <= self.config.max_positions:
            cos, sin = self.cos[None, :tokens], self.sin[None, :tokens]
        else:
            raise ValueError(f"{tokens} tokens exceed max_positions {self.config.max_positions}")
        rotation = Rotation(cos.unsqueeze(2), sin.unsqueeze(2), self.config.rope_interleaved)
        return Step(rotation, attend or CausalAttend(trace=trace), trace)

    def _blocks(self) -> Iterator[Block]:
        yield from (cast(Block, block) for block in self.layers)
        if self.mtp is not None:
            yield from (layer.block for layer in self.mtp.stored())
