"""Rotary position embedding: tables once, then one operation per layer.

Knows positions and head width, not layers or attention. The sign of the rotation lives in the sine
table, so that rotating is `x * cos + partner(x) * sin` for either kind of pair.
Source: Su et al., RoFormer, arXiv 2104.09864, eq. 34.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from headrace import ops
from headrace.model.config import ModelConfig


class Rotation(NamedTuple):
    """The rotation of each token of one forward pass.

    Attributes:
        cos: [B or 1, T, 1, d].
        sin: [B or 1, T, 1, d], negative where the partner is subtracted.
        interleaved: partners are (2i, 2i+1) instead of (i, i + d/2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def as_halves(self) -> "Rotation":
        """The same angles laid out for half rotation."""
        if not self.interleaved:
            return self
        cos, sin = self.cos[..., ::2], self.sin[..., ::2]
        return Rotation(torch.cat((cos, cos), -1), torch.cat((sin, -sin), -1), False)


def rotary_tables(
    config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every position, each [max_positions, d].

    Angles are computed in fp32 and only the results are cast to `dtype`.
    """
    angles = torch.outer(
        torch.arange(config.max_positions, device=device, dtype=torch.float32),
        inverse_frequencies(config, device=device),
    )
    cos, sin = angles.cos(), angles.sin()
    if config.rope_interleaved:
        cos = cos.repeat_interleave(2, dim=-1)
        sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
    dtype = dtype or torch.get_default_dtype()
    return cos.to(dtype), sin.to(dtype)


def inverse_frequencies(config: ModelConfig, *, device: torch.device | str | None) -> Tensor:
    """Angle per position step of each rotated pair, [d / 2], fp32, after `rope_scaling`."""
    exponents = torch.arange(0, config.rope_dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (exponents / config.rope_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slowed
    # llama3: long wavelengths are slowed, short ones kept, and a ramp joins the two.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * slowed


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads x [B, T, H, d] by their tokens' positions: same shape, the wider dtype."""
    if ops.is_small(x):
        return ops.reference.rotate(x, *rotation[:2], interleaved=rotation.interleaved)
    return ops.rotate(x, rotation.cos, rotation.sin, interleaved=rotation.interleaved)
