"""Law L12, same bits from the same seed, and law L14, same gradient however a batch is cut."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from law_cases import (
    CASES,
    WORLD,
    gradients,
    new_samples,
    new_trainer,
    results,
    step,
    weights,
)

from headrace.model.checkpoint import load_checkpoint
from headrace.training.checkpointing import load_state
from headrace.training.parallel import ALONE

DEADLINE_S = 600


def assert_close(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=0.0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", CASES)
def test_gradient_does_not_depend_on_micro_batches_packing_or_order(name):
    case = CASES[name]
    samples = new_samples(case)
    whole = gradients(new_trainer(case), case, samples)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    for micro_tokens, order in ((48, 1), (48, -1), (1, 1)):
        trainer = new_trainer(case, micro_tokens=micro_tokens)
        assert_close(gradients(trainer, case, samples[::order]), whole, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_losses_do_not_depend_on_micro_batches(name):
    case = CASES[name]
    found = [
        step(new_trainer(case, micro_tokens=micro), case, new_samples(case))
        for micro in (10_000, 30)
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_same_seed_same_bits(name):
    runs = []
    for _ in range(2):
        found = results(CASES[name], ALONE)
        runs.append({**found["gradients"], **found["weights"]})
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which two ranks have trained every case."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("law_cases.py")
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


@pytest.fixture(scope="module")
def found(folder):
    """What rank 0 wrote down."""
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(found, name):
    alone = results(CASES[name], ALONE)
    assert_close(found[name]["gradients"], alone["gradients"], 1e-6)
    assert_close(found[name]["weights"], alone["weights"])
    for ours, theirs in zip(found[name]["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_a_rank_without_samples_changes_nothing(found):
    case = CASES["mtp"]
    assert_close(
        found["one sample"], gradients(new_trainer(case), case, new_samples(case)[1:2]), 1e-6
    )


def test_two_ranks_resume_bit_for_bit_and_one_rank_takes_over(found, folder):
    assert found["resumed"].keys() == found["uninterrupted"].keys()
    for name, value in found["uninterrupted"].items():
        assert torch.equal(found["resumed"][name], value), name
    case = CASES["indexer adaptation"]
    alone = new_trainer(case)
    assert load_state(alone, folder / "state") == {"position": 1}
    assert alone.steps == 1
    step(alone, case, new_samples(case, 1))
    assert_close(weights(alone), found["uninterrupted"])


def test_sharded_weights_are_exported_whole(found, folder):
    exported = load_checkpoint(folder / "exported")
    assert_close(dict(exported.state_dict()), found["resumed"], 0.0)
