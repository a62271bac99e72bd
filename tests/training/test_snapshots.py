"""Checkpoints written beside training hold the weights of the moment they were begun."""

from pathlib import Path

import torch
from law_cases import CASES, new_samples, new_trainer, step

from headrace.model.checkpoint import load_checkpoint
from headrace.training.snapshots import SnapshotWriter
from headrace.training.trainer import OPTIMIZER_FILE


def held(path: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(path).hf_tensors()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_snapshot_is_the_checkpoint_of_its_moment(tmp_path):
    case = CASES[next(iter(CASES))]
    trainer, samples = new_trainer(case), new_samples(case)
    step(trainer, case, samples)
    with SnapshotWriter() as writer:
        places = set()
        for number in range(2):
            trainer.save(tmp_path / f"saved{number}", tokenizer_from=None, optimizer=True)
            writer.begin(trainer, tmp_path / f"beside{number}", tokenizer_from=None, optimizer=True)
            places |= {tensor.data_ptr() for tensor in writer._held.values()}
            assert len(places) == len(writer._held), "the second takes the memory of the first"
            step(trainer, case, samples)  # overwrites the weights while they are written
        writer.writing.result(timeout=60)
    for number in range(2):
        saved, beside = tmp_path / f"saved{number}", tmp_path / f"beside{number}"
        assert same(held(saved), held(beside))
        a, b = (torch.load(path / OPTIMIZER_FILE, weights_only=True) for path in (saved, beside))
        assert a["steps"] == b["steps"] == number + 1
        assert same(a["optimizer"], b["optimizer"])
    assert not same(held(tmp_path / "beside0"), held(tmp_path / "beside1"))
