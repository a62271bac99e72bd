"""Data parallelism: several processes, each with a shard of the weights, one optimizer step.

Parameters, gradients and optimizer state are sharded block by block (FSDP2). Gradients are summed
over ranks, not averaged: a loss is already divided by the whole batch's weight, so the sum is the
gradient that one process would have found (law L14).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from headrace.model.decoder import Decoder

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, seen from one of them.

    Attributes:
        rank: this process, in [0, size).
        size: how many there are; with 1 nothing is communicated.
        device: where this process computes.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over all ranks; `values` is left alone."""
        if self.size == 1:
            return values
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """[n_r, ...] of every rank, one after the other in rank order; n_r may differ."""
        if self.size == 1:
            return values
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, values.detach().cpu().numpy())
        return torch.cat([torch.from_numpy(part) for part in parts]).to(values.device)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, any picklable object, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()
"""The only process."""


@contextmanager
def joined(
    rank: int,
    size: int,
    rendezvous: str,
    *,
    device: torch.device = CPU,
    timeout_s: float = 600.0,
) -> Iterator[Ranks]:
    """Be one of `size` ranks while the block runs.

    Args:
        rendezvous: where ranks find each other: "file:///path" of a file that does not exist yet,
            or "tcp://host:port" of rank 0.
        device: gloo connects CPUs, nccl CUDA devices.
        timeout_s: longest wait of any single communication; a rank that dies ends the others.

    Raises:
        RuntimeError: the others did not come, or a communication failed or timed out.
    """
    if size == 1:
        yield Ranks(device=device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield Ranks(rank, size, device)
    finally:
        dist.destroy_process_group()


def shard(root: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks, *, keep_whole: bool) -> None:
    """Shard every block's parameters by itself, and the rest of `root`'s with it; in place.

    Args:
        root: the module whose forward starts a pass.
        blocks: its layers.
        ranks: more than one.
        keep_whole: keep a block's weights gathered between forward and backward. Needed when losses
            reach into blocks whose outputs carry no gradient: nothing would gather them again.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if keep_whole else None)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this, a factor becomes a kind of reduction that gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def synchronise_gradients(root: nn.Module, enabled: bool) -> None:
    """Whether the next backward exchanges gradients; off while micro-batches only accumulate."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(enabled)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (all ranks must call), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def unsharded(model: Decoder, ranks: Ranks) -> Decoder | None:
    """A plain copy of a sharded model on the CPU of rank 0, None on the others.

    All ranks must call. A model that is not sharded is returned itself.
    """
    if ranks.size == 1:
        return model
    state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if ranks.rank != 0:
        return None
    dtype = next(p.dtype for p in model.parameters() if p.dim() == 2)
    copy = Decoder(model.config, device="cpu", dtype=dtype)
    copy.load_state_dict(cast(Mapping[str, Tensor], state))
    return copy
