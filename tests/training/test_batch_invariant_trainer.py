"""Trainers whose forward has an engine's bits learn what ordinary ones learn.

That the bits are an engine's is shown in tests/engine/test_trainer_agreement.py.
"""

import dataclasses
from typing import Any

import pytest
import torch
from law_cases import (
    CASES,
    GLM5,
    ICEPOP,
    LLAMA,
    Case,
    gradients,
    new_samples,
    new_trainer,
    step,
    weights,
)

from headrace.errors import UserError
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.training.batch import Sample, supervised_sample
from headrace.training.batch_invariant import BatchInvariant
from headrace.training.forward import LossConfig, Pass
from headrace.training.parallel import Ranks
from headrace.training.rows import pack

MODELS = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, family="qwen3", qk_norm=True),
    "biased": dataclasses.replace(LLAMA, attention_bias=True, tie_embeddings=False),
    "glm5": GLM5,
    "deepseek_v3": dataclasses.replace(GLM5, family="deepseek_v3", indexer=None, mtp=None),
}


def logprobs(model: Decoder, samples: list[Sample]) -> torch.Tensor:
    run = Pass(model, LossConfig(), bfloat16=False, invariant=BatchInvariant(model))
    with torch.no_grad():
        return run(pack(samples), 0.7).logprobs


def new_model(config: ModelConfig = LLAMA) -> Decoder:
    torch.set_num_threads(1)
    model = Decoder(config)
    model.init_weights(0)
    return model


@pytest.mark.parametrize("objective", ["language", "rl", "rl, icepop and kl", "rl, two steps"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_updates_are_those_of_the_ordinary_forward(model, objective):
    case = CASES[objective]._replace(config=MODELS[model])
    plain, exact = (new_trainer(case, batch_invariant=b, micro_tokens=48) for b in (False, True))
    samples = new_samples(case)
    want, got = (gradients(trainer, case, samples) for trainer in (plain, exact))
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for seed in (0, 1):
        metrics = [step(trainer, case, new_samples(case, seed)) for trainer in (plain, exact)]
        assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-4, abs=1e-6)
        assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-4)
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(exact)[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("config", [LLAMA, GLM5, MODELS["deepseek_v3"]], ids=lambda c: c.family)
def test_a_tokens_logprob_does_not_depend_on_what_is_packed_beside_it(config):
    # Of the shortest, a model with an indexer would alone select nothing.
    samples = [
        supervised_sample(torch.randint(0, 40, (n,)).tolist(), [1.0] * n) for n in (3, 40, 17, 64)
    ]
    together = logprobs(new_model(config), samples)
    alone = torch.cat([logprobs(new_model(config), [sample]) for sample in samples])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("config", [LLAMA, GLM5], ids=lambda config: config.family)
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_every_step_computes_with_the_weights_of_the_last_one(algorithm, config):
    case = CASES["rl"]._replace(config=config)
    trainer = new_trainer(case, batch_invariant=True, learning_rate=1e-2, algorithm=algorithm)
    for seed in (0, 1):
        step(trainer, case, new_samples(case, seed))
    other = Decoder(case.config)
    other.load_state_dict(trainer.model.state_dict())
    samples = new_samples(case, 2)
    policies = trainer.ask_policies(samples, ICEPOP._replace(minibatches=2))
    assert policies.old is not None
    found = torch.cat([scores for scores in policies.old if scores is not None])
    run = Pass(other, LossConfig(), bfloat16=False, invariant=BatchInvariant(other))
    with torch.no_grad():
        assert torch.equal(found, run(pack(samples)).logprobs)


def test_the_memory_is_one_copy_of_the_matrices():
    model = new_model()
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() == 2)
    # Panels of 32 outputs are filled up with zeros: of 40 embeddings with 24, of q, k and v none.
    assert matrices <= BatchInvariant(model).nbytes < 1.5 * matrices


@pytest.mark.parametrize("config", [LLAMA, GLM5], ids=lambda config: config.family)
def test_checkpoints_know_nothing_of_it(config):
    model = new_model(config)
    BatchInvariant(model)
    assert list(model.state_dict()) == list(new_model(config).state_dict())


def test_what_has_no_such_forward_is_refused():
    half = Decoder(LLAMA, dtype=torch.bfloat16)
    refused: tuple[tuple[Decoder, dict[str, Any], str], ...] = (
        (half, {}, "embed.weight is torch.bfloat16 on cpu; it needs float32 on the CPU"),
        (new_model(), {"bfloat16": True}, 'batch_invariant = true with dtype = "bfloat16"'),
        (new_model(), {"ranks": 2}, "with 2 trainer ranks: .* use one rank"),
    )
    for model, options, message in refused:
        with pytest.raises(UserError, match=message):
            BatchInvariant(model, **options)
    with pytest.raises(UserError, match="2 trainer ranks"):
        new_trainer(Case(LLAMA), Ranks(0, 2), batch_invariant=True)
