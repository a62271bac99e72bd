"""A tiny GLM-5-shaped model, seeded gradients, and the process that steps a sharded copy of it.

Run as a script, one process per rank; `test_sharded` starts them and compares.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from headrace.model.config import (
    IndexerConfig,
    LatentConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
)
from headrace.model.decoder import Decoder
from headrace.optim import sharded
from headrace.optim.groups import OptimizerGroups, build_optimizers
from headrace.optim.newton_schulz import orthogonalise

WORLD = 2
STEPS = 3
SAVED_AFTER = 2
GROUPS = OptimizerGroups(
    0.05,
    weight_decay=0.1,
    scratch_elements=2000,
    embedding=0.5,
    router=0.3,
    indexer=2.0,
    precision="float32",
)


def tiny_model() -> Decoder:
    """Three heads and three experts, so that two ranks cut through a head of every kind."""
    model = Decoder(
        ModelConfig(
            vocab_size=50,
            hidden_size=20,
            intermediate_size=28,
            num_layers=2,
            num_heads=3,
            num_kv_heads=3,
            head_dim=12,
            family="glm_moe_dsa",
            rope_interleaved=True,
            latent=LatentConfig(q_rank=14, kv_rank=10, nope_dim=8, rope_dim=4, value_dim=6),
            indexer=IndexerConfig(num_heads=2, head_dim=8, topk=8, shared=(False, True)),
            moe=MoeConfig(3, 2, 16, leading_dense=1),
            mtp=MtpConfig(depth=2, shared=True),
        )
    )
    model.init_weights(0)
    return model


def gradients(model: Decoder, step: int) -> dict[str, torch.Tensor]:
    """A whole gradient for every parameter."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


def whole(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in values.items()
    }


def count_work() -> list[int]:
    """From now on, the sizes of what this process orthogonalises as an owner."""
    sizes = []

    def counted(matrices: torch.Tensor) -> torch.Tensor:
        sizes.append(matrices.numel())
        return orthogonalise(matrices)

    sharded.orthogonalise = counted
    return sizes


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        model = tiny_model()
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizers = build_optimizers(model, GROUPS)
        work = count_work()
        for step in range(STEPS):
            for name, gradient in gradients(model, step).items():
                parameter = model.get_parameter(name)
                assert isinstance(parameter, DTensor)
                parameter.grad = distribute_tensor(gradient, mesh, parameter.placements)
            optimizers.step()
            if step + 1 == SAVED_AFTER:
                weights, state = dict(model.named_parameters()), optimizers.named_state()
                save({"weights": weights, "state": state}, checkpoint_id=folder / "checkpoint")
        standard: Any = get_optimizer_state_dict(model, optimizers.members)["state"]
        momenta = {
            name: entry["momentum"] for name, entry in standard.items() if "momentum" in entry
        }
        result = {
            "weights": whole(dict(model.named_parameters())),
            "state": whole(optimizers.named_state()),
            "standard": whole(momenta),
        }
        torch.save(sum(work), folder / f"work{rank}.pt")
        if rank == 0:
            torch.save(result, folder / "result.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
