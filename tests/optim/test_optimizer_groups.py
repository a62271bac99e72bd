"""Every parameter has one optimizer and one group; state is named and continues exactly."""

import io

import pytest
import torch
from sharded_steps import gradients, tiny_model

from headrace.errors import UserError
from headrace.optim.groups import OptimizerGroups, build_optimizers, role_of

ROLES = {
    "embed.weight": "embedding",
    "lm_head.weight": "embedding",
    "norm.weight": "norm",
    "layers.0.attention.q_norm.weight": "norm",
    "layers.0.attention.q_up.weight": "matrix",
    "layers.0.attention.indexer.q_up.weight": "indexer",
    "layers.0.attention.indexer.weights.weight": "indexer",
    "layers.0.attention.indexer.key_norm.bias": "indexer_norm",
    "layers.1.feed_forward.router.weight": "router",
    "layers.1.feed_forward.experts.down": "matrix",
    "mtp.layers.0.join.weight": "matrix",
    "mtp.layers.0.embed_norm.weight": "norm",
}


def step(model, optimizers, seed, learning_rate=None):
    for name, gradient in gradients(model, seed).items():
        parameter = model.get_parameter(name)
        parameter.grad = gradient if parameter.requires_grad else None
    optimizers.step(learning_rate)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_roles_follow_the_names():
    parameters = dict(tiny_model().named_parameters())
    assert {name: role_of(name, parameters[name]) for name in ROLES} == ROLES


@pytest.mark.parametrize("algorithm", ["adamw", "muon", "muon_split"])
def test_every_parameter_is_in_one_group(algorithm):
    model = tiny_model()
    optimizers = build_optimizers(model, OptimizerGroups(0.1, algorithm=algorithm))
    members = [p for member in optimizers.members for g in member.param_groups for p in g["params"]]
    assert len(members) == len(set(members)) == len(list(model.parameters()))
    owners = {
        p: type(m).__name__ for m in optimizers.members for g in m.param_groups for p in g["params"]
    }
    muon = {name for name, p in model.named_parameters() if owners[p] == "Muon"}
    if algorithm == "adamw":
        assert not muon
    else:
        assert "layers.0.attention.indexer.q_up.weight" in muon
        for word in ("embed.", "lm_head", "norm", "router", "indexer.weights"):
            assert not any(word in name for name in muon)
    assert sum(group.parameters for group in optimizers.summary()) == model.num_parameters()


def test_decay_touches_matrices_only():
    """With zero gradients, AdamW and Muon only decay."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizers = build_optimizers(model, OptimizerGroups(0.1, weight_decay=0.5, router=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    for name, parameter in model.named_parameters():
        role = role_of(name, parameter)
        kept = {"matrix": 0.95, "indexer": 0.95, "router": 0.975}.get(role, 1.0)
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, kept))


def test_groups_move_by_their_multiple_of_the_rate_of_each_step():
    config = OptimizerGroups(0.1, embedding=0.5, norm=0.25, router=2.0, indexer=3.0)
    multiple = {
        "embedding": 0.5,
        "norm": 0.25,
        "router": 2.0,
        "matrix": 1.0,
        "indexer": 3.0,
        "indexer_norm": 3.0,
    }
    model, plain = tiny_model(), tiny_model()
    before = weights(model)
    step(model, build_optimizers(model, config), 0, learning_rate=0.01)
    step(plain, build_optimizers(plain, OptimizerGroups(0.1)), 0, learning_rate=0.01)
    moved, reference = weights(model), weights(plain)
    for name, parameter in model.named_parameters():
        factor = multiple[role_of(name, parameter)]
        wanted = factor * (reference[name] - before[name])
        torch.testing.assert_close(moved[name] - before[name], wanted, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("algorithm", ["adamw", "muon_split"])
def test_saved_and_loaded_state_continues_to_the_bit(algorithm):
    config = OptimizerGroups(0.02, algorithm=algorithm, weight_decay=0.1)
    straight = tiny_model()
    optimizers = build_optimizers(straight, config)
    for seed in range(2):
        step(straight, optimizers, seed)
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizers.named_state()}, file)
    step(straight, optimizers, 2)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = tiny_model()
    resumed.load_state_dict(saved["model"])
    again = build_optimizers(resumed, config)
    again.load_named_state(saved["optimizer"])
    step(resumed, again, 2)
    after = weights(straight)
    assert all(torch.equal(after[name], value) for name, value in weights(resumed).items())


def test_the_state_of_a_fresh_optimizer_continues_as_none():
    models = [tiny_model(), tiny_model()]
    both = [build_optimizers(model, OptimizerGroups(0.02)) for model in models]
    both[0].named_state()
    for model, optimizers in zip(models, both, strict=True):
        step(model, optimizers, 0)
    first, second = map(weights, models)
    assert all(torch.equal(first[name], value) for name, value in second.items())


def test_reset_forgets_everything():
    model, fresh = tiny_model(), tiny_model()
    optimizers = build_optimizers(model, OptimizerGroups(0.02))
    step(model, optimizers, 0)
    optimizers.reset()
    fresh.load_state_dict(model.state_dict())
    step(model, optimizers, 1)
    step(fresh, build_optimizers(fresh, OptimizerGroups(0.02)), 1)
    wanted = weights(fresh)
    assert all(torch.equal(wanted[name], value) for name, value in weights(model).items())


def test_frozen_parameters_stay_and_have_no_state():
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    optimizers = build_optimizers(model, OptimizerGroups(0.1, weight_decay=0.1))
    before = weights(model)
    step(model, optimizers, 0)
    assert all(".indexer." in name for name in optimizers.named_state())
    for name, value in weights(model).items():
        assert torch.equal(value, before[name]) == (".indexer." not in name)


def test_state_that_does_not_fit_is_refused_and_changes_nothing():
    model = tiny_model()
    optimizers = build_optimizers(model, OptimizerGroups(0.1))
    step(model, optimizers, 0)
    good = {name: value.clone() for name, value in optimizers.named_state().items()}
    name = "layers.0.attention.q_up.weight.momentum"
    for bad in (
        {k: v + 1 for k, v in good.items() if k != name},
        {k: v + 1 for k, v in good.items()} | {"layers.9.momentum": torch.ones(1)},
        {k: v + 1 for k, v in good.items()} | {name: torch.ones(2, 2)},
    ):
        with pytest.raises(UserError, match=r"(q_up|layers\.9).*saved by another model"):
            optimizers.load_named_state(bad)
        now = optimizers.named_state()
        assert all(torch.equal(now[key], value) for key, value in good.items())


def test_an_unknown_algorithm_names_the_known_ones():
    with pytest.raises(UserError, match=r"'sgd'.*adamw, muon, muon_split"):
        build_optimizers(tiny_model(), OptimizerGroups(0.1, algorithm="sgd"))  # type: ignore[arg-type]
