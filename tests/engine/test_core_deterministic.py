"""Deterministic mode over latents, experts and drafts: one request's bits in every batch.

Grouped-query models have the same test in `test_core_paged`.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import (
    VOCAB,
    ask,
    drain,
    latent_model,
    logprobs,
    new_core,
    output,
    random_prompt,
)

from headrace.engine.core import EngineCore
from headrace.engine.drafting import Computed
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import IndexerConfig, LatentConfig, MoeConfig, MtpConfig
from headrace.model.decoder import Decoder

SHAPE: dict[str, Any] = {
    "hidden_size": 72,
    "num_heads": 5,
    "num_kv_heads": 5,
    "head_dim": 26,
    "tie_embeddings": False,
    "latent": LatentConfig(q_rank=40, kv_rank=44, nope_dim=20, rope_dim=6, value_dim=22),
}
"""Odd widths, wide enough that libraries change the order of sums with the number of rows."""

KINDS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {
        "indexer": IndexerConfig(3, 16, topk=24, shared=(False, True, False)),
        "moe": MoeConfig(6, 4, 40, leading_dense=1, scaling=1.5),
        "mtp": MtpConfig(depth=2),
    },
    "deepseek_v32": {"indexer": IndexerConfig(2, 18, topk=24, rope_interleaved=False)},
    "deepseek_v3": {"moe": MoeConfig(5, 5, 40, leading_dense=1), "mtp": MtpConfig(depth=1)},
}
CASES = [
    *(("glm_moe_dsa", precision) for precision in ("fp32", "bf16", "int8")),
    ("deepseek_v32", "bf16"),
    ("deepseek_v3", "fp32"),
    ("deepseek_v3", "bf16"),
]
SEEDS = range(1, 6)

Outcome = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]
"""Ids, logprobs and raw logprobs."""


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each kind."""
    paths = {kind: tmp_path_factory.mktemp(kind) / "model" for kind in KINDS}
    for kind, path in paths.items():
        model = latent_model(kind, **SHAPE, **KINDS[kind])
        assert model.lm_head is not None
        with torch.no_grad():
            # Texts that do not go round in circles, from distributions that are not flat.
            model.lm_head.weight.mul_(10.0)
        save_checkpoint(model, path)
    return paths


def load(path: Path, precision: str) -> Decoder:
    return load_checkpoint(path, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)


class Oracle:
    """Drafts what "mine" will say, wrong at every fifth token, and nothing for others."""

    def __init__(self, text: tuple[int, ...]) -> None:
        self.text = text

    def draft(self, parts: list[Computed]) -> None:
        for part in parts:
            if part.sequence.id == "mine":
                known = part.sequence.length
                part.sequence.drafts = [
                    (token + (i % 5 == 0)) % VOCAB
                    for i, token in enumerate(self.text[known : known + part.depth], known)
                ]


def run(
    model: Decoder, seed: int, known: tuple[int, ...] = (), **config: object
) -> tuple[Outcome, EngineCore]:
    """One request among others that come, end, press for memory and share its prompt.

    Args:
        model: taken over.
        seed: of everything around it; 0 is nothing.
        known: what it will say, for some seeds to draft it.
        config: of the core.
    """
    rng = random.Random(seed)
    torch.set_num_threads(rng.choice([1, 2]) if seed else 1)
    core = new_core(
        model,
        **{
            "deterministic": True,
            "prefill_tokens": rng.choice([3, 17, 64]),
            "cache_tokens": rng.choice([96, 160, 1024]),
            "draft_tokens": rng.choice([1, 3]) if seed else 0,
            "max_context": 96,
            **config,
        },
    )
    prompt = random_prompt(1, 33)
    if known and seed % 2:
        core._drafter = Oracle((*prompt, *known))  # type: ignore[assignment]  # a stand-in
    others = [
        ask(
            f"n{i}",
            (*prompt[: rng.choice([0, 20, 33])], *random_prompt(50 + i, rng.randint(1, 30))),
            temperature=1.0,
            seed=i,
            max_tokens=rng.randint(1, 20),
        )
        for i in range(rng.choice([2, 3, 9]) if seed else 0)
    ]
    queue = [*others, ask("mine", prompt, temperature=1.0, seed=5, max_tokens=30)]
    rng.shuffle(queue)
    while "mine" not in core._open:
        core.add(queue.pop())
    results = drain(core, between=lambda _: core.add(queue.pop()) if queue else None)
    mine = results["mine"]
    return (output(mine), logprobs(mine), tuple(mine.raw_logprobs)), core


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_tokens_and_logprobs_are_the_same_to_the_bit_in_every_batch(
    kind: str, precision: str, weights: dict[str, Path]
) -> None:
    config: dict[str, Any] = {"weights": "int8"} if precision == "int8" else {}
    alone, _ = run(load(weights[kind], precision), 0, **config)
    assert len(set(alone[0])) > 15
    reused = preempted = accepted = refused = 0
    for seed in SEEDS:
        got, core = run(load(weights[kind], precision), seed, alone[0], **config)
        assert got == alone, seed
        stats = core.stats()
        reused += stats.tokens_reused
        preempted += stats.preemptions
        accepted += stats.tokens_accepted
        refused += stats.tokens_drafted - stats.tokens_accepted
    assert min(reused, preempted, accepted, refused) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_plain_batches_do_differ_in_their_bits(kind: str, weights: dict[str, Path]) -> None:
    """What the test above would miss if its models were too small or its batches too much alike."""
    alone, _ = run(load(weights[kind], "fp32"), 0, deterministic=False)
    assert any(
        run(load(weights[kind], "fp32"), seed, deterministic=False)[0] != alone for seed in SEEDS
    )
