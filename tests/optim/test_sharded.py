"""Sharded over two processes, the optimizers do what they do on whole tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sharded_steps import GROUPS, SAVED_AFTER, STEPS, WORLD, gradients, tiny_model
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headrace.errors import UserError
from headrace.optim.blocks import RowSplit, matrix_blocks
from headrace.optim.groups import build_optimizers
from headrace.optim.sharded import RowShard, aligned_split, row_shard

DEADLINE_S = 180


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which two processes have stepped the sharded model."""
    folder = tmp_path_factory.mktemp("sharded")
    script = Path(__file__).with_name("sharded_steps.py")
    workers = [
        subprocess.Popen(
            [sys.executable, script, folder, str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=DEADLINE_S)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return folder


def stepped(model, optimizers, steps):
    for step in steps:
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizers.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_two_processes_equal_one(folder):
    result = torch.load(folder / "result.pt", weights_only=True)
    model = tiny_model()
    optimizers = build_optimizers(model, GROUPS)
    assert_equal(result["weights"], stepped(model, optimizers, range(STEPS)))
    assert_equal(result["state"], optimizers.named_state())


def test_owners_share_the_work_and_do_each_block_once(folder):
    work = [torch.load(folder / f"work{rank}.pt", weights_only=True) for rank in range(WORLD)]
    straddling = 0
    for parameter, split in matrix_blocks(tiny_model()):
        half = -(-parameter.shape[0] // WORLD)
        shard = RowShard(None, 0, (0, half, parameter.shape[0]))  # type: ignore[arg-type]
        if aligned_split(parameter.shape, split, shard) is None:
            straddling += parameter.numel()
    assert sum(work) == STEPS * straddling
    assert max(work) < 1.2 * min(work)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_continues_in_one_process(folder):
    result = torch.load(folder / "result.pt", weights_only=True)
    model = tiny_model()
    optimizers = build_optimizers(model, GROUPS)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    load(
        {"weights": weights, "state": optimizers.named_state()},
        checkpoint_id=folder / "checkpoint",
        no_dist=True,
    )
    continued = stepped(model, optimizers, range(SAVED_AFTER, STEPS))
    assert_equal(result["weights"], continued)


def test_torchs_own_optimizer_state_dict_sees_the_momentum(folder):
    result = torch.load(folder / "result.pt", weights_only=True)
    assert result["standard"]
    for name, value in result["standard"].items():
        assert torch.equal(value, result["state"][f"{name}.momentum"])


@pytest.mark.parametrize(
    ("shape", "split", "bounds", "wanted"),
    [
        ((12, 5), RowSplit((3,), 4), (0, 6, 12), RowSplit((3,), 2)),
        ((12, 5), RowSplit((2, 1), 4), (0, 6, 12), RowSplit((2, 1), 2)),
        ((12, 5), RowSplit((2, 1), 4, joined=True), (0, 6, 12), None),
        ((9, 5), RowSplit((3,), 3), (0, 5, 9), None),
        ((12, 5), RowSplit((6, 6)), (0, 6, 12), None),
        ((3, 8, 5), RowSplit((4, 4)), (0, 2, 3), RowSplit((4, 4))),
    ],
)
def test_whole_heads_and_experts_stay_where_they_are(shape, split, bounds, wanted):
    assert aligned_split(shape, split, RowShard(None, 1, bounds)) == wanted  # type: ignore[arg-type]


def test_columns_may_not_be_sharded(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
        with pytest.raises(UserError, match="dimension 0"):
            row_shard(parameter)
    finally:
        torch.distributed.destroy_process_group()
