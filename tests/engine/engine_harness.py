"""Small random models and shorthands for the engine's tests."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.engine.core import EngineConfig, EngineCore
from headrace.engine.drafting import Computed
from headrace.engine.types import (
    GenerationFailure,
    GenerationRequest,
    GenerationResult,
    Progress,
    SamplingParams,
)
from headrace.model.config import (
    IndexerConfig,
    LatentConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
)
from headrace.model.decoder import Decoder

VOCAB = 97


def tiny_config(**changes: object) -> ModelConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "max_positions": 256,
        "tie_embeddings": True,
    }
    return ModelConfig(**{**fields, **changes})  # type: ignore[arg-type]  # a test's shorthand


def tiny_model(seed: int = 0, **changes: object) -> Decoder:
    """A random model whose distributions are neither flat nor peaked."""
    model = Decoder(tiny_config(**changes), dtype=torch.float32)
    model.init_weights(seed)
    with torch.no_grad():
        model.embed.weight.mul_(20.0)
    return model


LATENT_KINDS: dict[str, dict[str, object]] = {
    "glm_moe_dsa": {
        "indexer": IndexerConfig(2, 8, topk=8, shared=(False, True, False)),
        "moe": MoeConfig(6, 2, 24, leading_dense=1, scaling=1.5),
        "mtp": MtpConfig(depth=2),
    },
    "deepseek_v32": {"indexer": IndexerConfig(2, 8, topk=8, rope_interleaved=False)},
    "deepseek_v3": {"moe": MoeConfig(4, 2, 24, leading_dense=2)},
}
"""Models that hold latents: sparse with IndexShare, experts and prediction; sparse; dense."""


def latent_model(kind: str, seed: int = 0, **changes: object) -> Decoder:
    """As `tiny_model`, with one of `LATENT_KINDS`. Experts are chosen with a bias that matters."""
    fields = {
        "family": kind,
        "num_layers": 3,
        "num_kv_heads": 4,
        "head_dim": 14,
        "rope_interleaved": True,
        "latent": LatentConfig(q_rank=20, kv_rank=16, nope_dim=10, rope_dim=4, value_dim=12),
        **LATENT_KINDS[kind],
    }
    model = tiny_model(seed, **{**fields, **changes})
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def new_core(model: Decoder, **config: object) -> EngineCore:
    fields = {"max_running": 8, "max_context": 128, "block_tokens": 8, "seed": 1}
    return EngineCore(model, EngineConfig(**{**fields, **config}))  # type: ignore[arg-type]  # as above


def ask(
    request_id: str,
    prompt: Sequence[int],
    *,
    timeout_s: float = 60.0,
    session: str = "",
    priority: int = 0,
    **sampling: object,
) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})  # type: ignore[arg-type]  # as above
    return GenerationRequest(
        request_id, tuple(prompt), params, timeout_s, session=session, priority=priority
    )


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def drain(
    core: EngineCore,
    *,
    between: Callable[[int], None] | None = None,
    watch: Callable[[Progress], None] | None = None,
    limit: int = 2000,
) -> dict[str, GenerationResult]:
    """Step until nothing is left; `between(step)` runs after each step."""
    results: dict[str, GenerationResult] = {}
    for step in range(limit):
        if not core.has_work:
            return results
        for ended in core.step():
            assert not isinstance(ended, GenerationFailure), ended
            if isinstance(ended, Progress):
                assert watch is not None
                watch(ended)
                continue
            results[ended.id] = ended
        if between is not None:
            between(step)
    raise AssertionError(f"work left after {limit} steps")


def output(result: GenerationResult) -> tuple[int, ...]:
    return tuple(i for span in result.spans for i in span.ids)


def logprobs(result: GenerationResult) -> tuple[float, ...]:
    return tuple(p for span in result.spans for p in span.logprobs)


@torch.inference_mode()
def full_logits(model: Decoder, ids: Sequence[int]) -> Tensor:
    """[T, V] from one plain causal pass."""
    return model.logits(model(torch.tensor([list(ids)])))[0]


def greedy_reference(model: Decoder, prompt: Sequence[int], n: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(full_logits(model, ids)[-1].argmax()))
    return tuple(ids[len(prompt) :])


class Oracle:
    """In place of a drafter: drafts what the model will say, wrong at every seventh token."""

    def __init__(self, model: Decoder, prompts: dict[str, tuple[int, ...]], tokens: int) -> None:
        self.texts = {
            name: (*prompt, *greedy_reference(model, prompt, tokens))
            for name, prompt in prompts.items()
        }

    def draft(self, parts: list[Computed]) -> None:
        for part in parts:
            sequence = part.sequence
            known = sequence.length
            text = self.texts.get(sequence.id, ())[known : known + part.depth]
            sequence.drafts = [
                (token + 1) % VOCAB if (known + i) % 7 == 0 else token
                for i, token in enumerate(text)
            ]
