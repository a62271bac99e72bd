"""Interrupted and resumed equals uninterrupted, to the bit; and what a checkpoint refuses."""

import json

import pytest
import torch
from law_cases import CASES, new_samples, new_trainer, step, weights

from headrace.errors import UserError
from headrace.training import checkpointing
from headrace.training.checkpointing import latest, load_state, read_extra, save_state
from headrace.training.guards import GuardConfig


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("algorithm", ["adamw", "muon_split"])
def test_resumed_training_has_the_bits_of_uninterrupted_training(name, algorithm, tmp_path):
    case = CASES[name]
    trainer = new_trainer(case, algorithm=algorithm)
    for seed in range(2):
        step(trainer, case, new_samples(case, seed))
    save_state(trainer, tmp_path, {"stream": {"position": 2}}, keep=1)
    for seed in range(2, 4):
        step(trainer, case, new_samples(case, seed))
    resumed = new_trainer(case, algorithm=algorithm)
    assert load_state(resumed, tmp_path) == {"stream": {"position": 2}}
    for seed in range(2, 4):
        step(resumed, case, new_samples(case, seed))
    each = 1 if case.rl is None else case.rl.minibatches
    assert resumed.steps == trainer.steps == 4 * each
    found, wanted = weights(resumed), weights(trainer)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_guard_and_random_state_come_back(tmp_path):
    case = CASES["language"]
    trainer = new_trainer(case)
    trainer.guard = GuardConfig()
    step(trainer, case, new_samples(case))
    save_state(trainer, tmp_path, {}, keep=1)
    wanted = torch.rand(3)
    resumed = new_trainer(case)
    torch.manual_seed(99)
    load_state(resumed, tmp_path)
    assert torch.equal(torch.rand(3), wanted)
    assert resumed.guard_state == trainer.guard_state
    assert resumed.guard_state.applied == 1


def test_only_the_last_ones_are_kept_and_the_newest_is_read(tmp_path):
    case = CASES["language"]
    trainer = new_trainer(case)
    assert latest(tmp_path) is None
    assert read_extra(tmp_path / "none") is None
    for number in range(4):
        step(trainer, case, new_samples(case, number))
        path = save_state(trainer, tmp_path, {"number": number}, keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000003", "step-00000004"]
    assert latest(tmp_path) == path
    assert read_extra(tmp_path) == {"number": 3}


def test_a_failed_save_leaves_the_old_checkpoint_and_no_litter(tmp_path, monkeypatch):
    case = CASES["language"]
    trainer = new_trainer(case)
    save_state(trainer, tmp_path, {"number": 0}, keep=1)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    step(trainer, case, new_samples(case))
    monkeypatch.setattr(checkpointing, "save", fail)
    with pytest.raises(OSError, match="No space"):
        save_state(trainer, tmp_path, {"number": 1}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000"]
    assert read_extra(tmp_path) == {"number": 0}


def test_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path):
    trainer = new_trainer(CASES["language"])
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        load_state(trainer, tmp_path)
    save_state(trainer, tmp_path, {}, keep=1)
    small = CASES["language"].config.__class__(
        **{**vars(CASES["language"].config), "intermediate_size": 40}
    )
    others = (
        (new_trainer(CASES["mtp"]), "lacks"),
        (new_trainer(CASES["language"], algorithm="muon"), "lacks optimizer"),
        (new_trainer(CASES["language"]._replace(config=small)), "another shape"),
    )
    for other, problem in others:
        before = weights(other)
        with pytest.raises(UserError, match=problem):
            load_state(other, tmp_path)
        assert all(torch.equal(weights(other)[key], before[key]) for key in before)
    state = tmp_path / "step-00000000" / "state.json"
    state.write_text(json.dumps({})[:1])
    with pytest.raises(UserError, match="unreadable"):
        read_extra(tmp_path)
