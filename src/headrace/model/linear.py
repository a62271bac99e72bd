"""Linear layers and embeddings that are born without values.

A decoder is always filled right after construction, by `init_weights` or from a checkpoint; drawing
torch's default initialisation first would only cost seconds and move the random state.
"""

from typing import cast

import torch
from torch import nn
from torch.nn.utils import skip_init


def new_linear(
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Linear:
    """An `nn.Linear` with uninitialised weight [outputs, inputs] and, if asked, bias [outputs]."""
    device = torch.get_default_device() if device is None else device
    linear = cast(
        nn.Linear, skip_init(nn.Linear, inputs, outputs, bias=bias, device=device, dtype=dtype)
    )
    if linear.weight.dtype == torch.float32:
        # Same [outputs, inputs] matrix, kept input-major in memory: the fp32 CPU product with the
        # few rows of a decoding batch is about 1.7 times as fast, and no slower with many rows.
        weight = torch.empty(inputs, outputs, device=device, dtype=dtype)
        linear.weight = nn.Parameter(weight.t())
    return linear


def new_embedding(
    count: int, width: int, *, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Embedding:
    """An `nn.Embedding` with uninitialised weight [count, width]."""
    device = torch.get_default_device() if device is None else device
    return cast(nn.Embedding, skip_init(nn.Embedding, count, width, device=device, dtype=dtype))
