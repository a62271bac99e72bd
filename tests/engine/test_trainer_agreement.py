"""Law L11 in fp32: the logprobs an engine reports are the ones an RL step computes, to 1e-5.

The trainer's side is `Trainer.rl_step` over loaded checkpoints. The engine's side goes every way a
token can come about: over shared and own prefixes, after prompts computed in pieces, after giving
its memory to others, and under weights that changed while it ran.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_harness import (
    LATENT_KINDS,
    ask,
    drain,
    latent_model,
    new_core,
    output,
    random_prompt,
    tiny_model,
)

from headrace.engine.core import EngineCore
from headrace.engine.sampling.batch import SamplingBatch
from headrace.engine.types import GenerationResult, SamplingParams
from headrace.model.checkpoint import load_checkpoint
from headrace.model.decoder import Decoder
from headrace.ops import linear_cross_entropy
from headrace.rollout.types import Segment
from headrace.training.batch import Sample, rollout_sample, supervised_sample
from headrace.training.trainer import OptimizerConfig, RlConfig, Trainer

torch.set_num_threads(1)

TOLERANCE = 1e-5
WRONG = 100 * TOLERANCE
"""What a mistake has to exceed to count as seen."""

DENSE: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "biased": {"attention_bias": True, "tie_embeddings": False},
}


def new_model(kind: str, **changes: object) -> Decoder:
    """A random model in which norms and biases count too."""
    if kind in LATENT_KINDS:
        model = latent_model(kind, **changes)  # type: ignore[arg-type]  # a test's shorthand
    else:
        model = tiny_model(**{**DENSE[kind], **changes})  # type: ignore[arg-type]  # as above
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if model.lm_head is not None:
            model.lm_head.weight.mul_(20.0)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def save_versions(kind: str, folder: Path, **changes: object) -> tuple[Path, Path]:
    """Checkpoints of two versions, one optimizer step apart."""
    trainer = Trainer(new_model(kind, **changes), OptimizerConfig(1e-3))
    paths = folder / "0", folder / "1"
    trainer.save(paths[0], tokenizer_from=None, optimizer=False)
    text = [supervised_sample(random_prompt(90 + i, 40), [1.0] * 40) for i in range(4)]
    trainer.supervised_step(text)
    trainer.save(paths[1], tokenizer_from=None, optimizer=False)
    return paths


class Conversation:
    """One session as the engine read and wrote it, with what it reported."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def read(self, ids: Sequence[int]) -> None:
        """What the engine is told before it answers."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def wrote(self, result: GenerationResult) -> None:
        """What it answered."""
        for span in result.spans:
            self.ids += span.ids
            self.logprobs += span.logprobs
            self.versions += [span.weight_version] * len(span.ids)

    def sample(self) -> Sample:
        mask = tuple(version >= 0 for version in self.versions)
        segment = Segment("s", tuple(self.ids), mask, tuple(self.logprobs), tuple(self.versions))
        return rollout_sample(segment, advantage=1.0)


def talk(
    core: EngineCore,
    turns: int,
    *,
    sessions: int = 6,
    shared: int = 24,
    added: int = 9,
    tokens: int = 12,
    temperature: float = 1.0,
    update: tuple[int, int, Path] | None = None,
) -> list[Conversation]:
    """Sessions that begin alike and go on by themselves, all at once.

    Args:
        shared: tokens that all begin with.
        added: new prompt tokens of every turn.
        tokens: sampled in every turn.
        update: (turn, steps into it, checkpoint) of version 1.
    """
    conversations = [Conversation() for _ in range(sessions)]
    for turn in range(turns):
        for i, conversation in enumerate(conversations):
            if turn == 0:
                conversation.read(random_prompt(1000, shared))
            conversation.read(random_prompt(100 * turn + i, added))
            core.add(
                ask(
                    f"{turn}/{i}",
                    conversation.ids,
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=100 * turn + i,
                    session=str(i),
                )
            )

        def change_weights(step: int, turn: int = turn) -> None:
            if update is not None and (turn, step) == update[:2]:
                core.load_weights(str(update[2]), 1)

        results = drain(core, between=change_weights)
        for i, conversation in enumerate(conversations):
            assert len(output(results[f"{turn}/{i}"])) == tokens
            conversation.wrote(results[f"{turn}/{i}"])
    return conversations


def mismatch(
    weights: Path,
    conversations: Sequence[Conversation],
    version: int,
    temperature: float = 1.0,
    *,
    batch_invariant: bool = False,
) -> float:
    """Largest difference on tokens of `version` that an RL step reports over these weights."""
    trainer = Trainer(
        load_checkpoint(weights), OptimizerConfig(1e-3, batch_invariant=batch_invariant)
    )
    metrics = trainer.rl_step(
        [conversation.sample() for conversation in conversations],
        RlConfig(0.2, 0.28, temperature),
        version=version,
        fresh=True,
    )
    return metrics["mismatch_max_abs"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, {}) for kind in (*DENSE, *LATENT_KINDS)),
        ("qwen3", {"compiled": False}),
        ("biased", {"compiled": False}),
        ("qwen3", {"deterministic": True}),
        ("biased", {"deterministic": True}),
        ("glm_moe_dsa", {"draft_tokens": 3}),
        ("glm_moe_dsa", {"deterministic": True, "draft_tokens": 2}),
        ("deepseek_v3", {"deterministic": True}),
    ],
)
def test_every_token_has_the_trainers_logprob(
    kind: str, engine: dict[str, object], temperature: float, tmp_path: Path
) -> None:
    weights = save_versions(kind, tmp_path)
    model = load_checkpoint(weights[0])
    indexer = model.config.indexer
    core = new_core(model, max_running=6, cache_tokens=200, prefill_tokens=7, **engine)
    conversations = talk(core, 3, tokens=20, temperature=temperature, update=(1, 30, weights[1]))

    stats = core.stats()
    assert min(stats.tokens_reused, stats.preemptions, stats.tokens_recomputed) > 0
    # Attention selects from the first sampled token on.
    assert indexer is None or indexer.topk < 24
    sampled = [[c.versions.count(version) for c in conversations] for version in (0, 1)]
    assert any(before % 20 for before in sampled[0]), "no request ran under both versions"
    assert min(map(sum, sampled)) > 80
    for version in (0, 1):
        assert mismatch(weights[version], conversations, version, temperature) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, {"compiled": compiled}) for kind in DENSE for compiled in (True, False)),
        *((kind, {}) for kind in LATENT_KINDS),
        ("glm_moe_dsa", {"draft_tokens": 2}),
    ],
)
def test_a_batch_invariant_trainer_finds_a_deterministic_engines_logprobs_to_the_bit(
    kind: str, engine: dict[str, object], temperature: float, tmp_path: Path
) -> None:
    weights = save_versions(kind, tmp_path)
    model = load_checkpoint(weights[0])
    core = new_core(
        model, max_running=6, cache_tokens=200, prefill_tokens=7, deterministic=True, **engine
    )
    conversations = talk(core, 3, tokens=20, temperature=temperature, update=(1, 30, weights[1]))
    stats = core.stats()
    assert min(stats.tokens_reused, stats.preemptions, stats.tokens_recomputed) > 0
    for version in (0, 1):
        found = mismatch(
            weights[version], conversations, version, temperature, batch_invariant=True
        )
        assert found == 0.0


@pytest.mark.parametrize("kind", ["llama", "glm_moe_dsa"])
def test_twenty_turns_agree_and_prefill_little_more_than_is_new(kind: str, tmp_path: Path) -> None:
    weights, _ = save_versions(kind, tmp_path, max_positions=640)
    core = new_core(load_checkpoint(weights), max_context=640)
    conversations = talk(core, 20, sessions=3, shared=0, added=24, tokens=5)
    assert mismatch(weights, conversations, 0) < TOLERANCE
    assert core.stats().tokens_prefilled / (3 * 20 * 24) <= 1.05


@pytest.mark.parametrize("kind", ["llama", "glm_moe_dsa"])
def test_weights_one_version_off_are_seen(kind: str, tmp_path: Path) -> None:
    weights = save_versions(kind, tmp_path)
    # Stamped 0, and yet a step ahead.
    conversations = talk(new_core(load_checkpoint(weights[1])), 1)
    assert mismatch(weights[0], conversations, 0) > WRONG
    assert mismatch(weights[1], conversations, 0) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "glm_moe_dsa"])
def test_keys_and_values_that_outlive_their_weights_are_seen(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = save_versions(kind, tmp_path)
    core = new_core(load_checkpoint(weights[0]))
    monkeypatch.setattr(core._scheduler, "drop_computed", lambda *_, **__: None)
    conversations = talk(core, 1, update=(0, 8, weights[1]))
    assert mismatch(weights[0], conversations, 0) < TOLERANCE
    assert mismatch(weights[1], conversations, 1) > WRONG


def test_another_temperature_than_the_trainers_is_seen(tmp_path: Path) -> None:
    weights, _ = save_versions("llama", tmp_path)
    conversations = talk(new_core(load_checkpoint(weights)), 1, temperature=0.7)
    assert mismatch(weights, conversations, 0, temperature=1.0) > WRONG
    assert mismatch(weights, conversations, 0, temperature=0.7) < TOLERANCE


def test_unlikely_ids_of_a_wide_vocabulary_count_as_they_do_for_the_trainer() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 0.1 * torch.randn(16, 49_152, generator=generator)
    # A few ids have the mass, and the others together still 4e-5 of it.
    logits[:, :64] += 16.7
    params = [SamplingParams(max_tokens=1, temperature=1.0 if i % 2 else 0.0) for i in range(16)]
    draw = SamplingBatch(params, list(range(16)), [0] * 16).sample(logits)
    assert len(set(draw.ids.tolist())) > 4
    trainers, _ = linear_cross_entropy(torch.eye(16), logits.T.contiguous(), draw.ids)
    for reported in (draw.logprobs, draw.raw_logprobs):
        torch.testing.assert_close(reported, trainers, rtol=0.0, atol=2e-6)
