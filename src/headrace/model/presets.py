"""Named model shapes, and how many parameters a shape has.

A preset is a `ModelConfig` and nothing more: random weights come from `Decoder.init_weights`. The
two small ones keep GLM-5's traits (values as wide as keys, an indexer in every layer, leading dense
layers, a shared expert, prediction steps that share parameters) at sizes for one machine.
Source of "glm5": GLM-5, arXiv 2602.15763, table of architectures, and its released config.json.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.errors import UserError
from headrace.model.config import (
    IndexerConfig,
    LatentConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    latent_family,
)

PRESETS: dict[str, ModelConfig] = {
    "glm5-tiny": ModelConfig(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=48,
        max_positions=2048,
        tie_embeddings=True,
        latent=LatentConfig(q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=48),
        indexer=IndexerConfig(num_heads=8, head_dim=32, topk=128),
        moe=MoeConfig(8, 2, 96, num_shared=1, leading_dense=1, scaling=2.5),
        mtp=MtpConfig(depth=3, shared=True),
        rope_interleaved=True,
        family="glm_moe_dsa",
    ),
    "glm5-mini": ModelConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=12,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        max_positions=4096,
        tie_embeddings=True,
        latent=LatentConfig(q_rank=256, kv_rank=128, nope_dim=48, rope_dim=16, value_dim=64),
        indexer=IndexerConfig(num_heads=8, head_dim=64, topk=256),
        moe=MoeConfig(16, 4, 256, num_shared=1, leading_dense=1, scaling=2.5),
        mtp=MtpConfig(depth=3, shared=True),
        rope_interleaved=True,
        family="glm_moe_dsa",
    ),
    "glm5": ModelConfig(
        vocab_size=154880,
        hidden_size=6144,
        intermediate_size=12288,
        num_layers=78,
        num_heads=64,
        num_kv_heads=64,
        head_dim=256,
        max_positions=202752,
        rope_theta=1e6,
        latent=LatentConfig(q_rank=2048, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256),
        indexer=IndexerConfig(num_heads=32, head_dim=128, topk=2048),
        moe=MoeConfig(256, 8, 2048, num_shared=1, leading_dense=3, scaling=2.5),
        mtp=MtpConfig(depth=3, shared=True),
        rope_interleaved=True,
        family="glm_moe_dsa",
    ),
}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model; a tied embedding counts once.

    Attributes:
        total: of the main model, without prediction layers. What "744B" means.
        active: those of `total` that one token is multiplied with: K of E routed experts, and not
            the input embedding, which is looked up. A tied embedding is active as the output
            projection. What "40B" means.
        mtp: of the prediction layers; stored as well, unused unless drafting or training.
        by_part: the parameters of `total` by what they belong to.
    """

    total: int
    active: int
    mtp: int
    by_part: dict[str, int]

    @property
    def stored(self) -> int:
        """Everything a checkpoint holds."""
        return self.total + self.mtp


def preset(name: str, vocab_size: int | None = None, **overrides: Any) -> ModelConfig:
    """A named shape, with changes.

    Args:
        name: one of `PRESETS`.
        vocab_size: replaces the preset's; pass that of the tokenizer.
        overrides: fields of `ModelConfig`. A mapping for latent, indexer, moe or mtp changes the
            fields it names, None removes that part. `family`, `num_kv_heads` and `head_dim` follow
            from the others unless given.

    Raises:
        UserError: no such preset or field, or values that do not fit each other.
    """
    if name not in PRESETS:
        raise UserError(f'model preset "{name}" is unknown{_nearest(name, list(PRESETS))}')
    changes = dict(overrides)
    if vocab_size is not None:
        changes["vocab_size"] = vocab_size
    config = PRESETS[name]
    _check_fields(f"model preset {name}", config, changes)
    for part in ("latent", "indexer", "moe", "mtp"):
        if isinstance(value := changes.get(part), Mapping):
            old = getattr(config, part)
            _check_fields(f"model preset {name}: {part}", old, value)
            changes[part] = replace(old, **value)
    latent = changes.get("latent", config.latent)
    if latent is not None:
        changes.setdefault("family", latent_family(changes.get("indexer", config.indexer)))
        changes.setdefault("num_kv_heads", changes.get("num_heads", config.num_heads))
        changes.setdefault("head_dim", latent.nope_dim + latent.rope_dim)
    return replace(config, **changes)


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count without allocating: the model is built on the meta device.

    Takes a second for the largest preset.
    """
    by_part: dict[str, int] = {}
    mtp = 0
    for name, size in _sizes(config):
        if name.startswith("mtp."):
            mtp += size
        else:
            part = _part(name)
            by_part[part] = by_part.get(part, 0) + size
    total = sum(by_part.values())
    active = total
    if config.moe is not None:
        routed = by_part["routed experts"]
        active -= routed - routed * config.moe.experts_per_token // config.moe.num_experts
    if not config.tie_embeddings:
        active -= by_part["embedding"]
    return ParameterCount(total, active, mtp, by_part)


def cache_bytes_per_token(config: ModelConfig, bytes_per_number: int = 2) -> int:
    """Bytes of keys and values the main model caches for one token; 2 per number is bfloat16.

    Latent attention holds one latent and one rotated key per layer, plus an indexer key per layer
    that selects; grouped-query attention holds keys and values of its Hkv heads.
    """
    latent, indexer, layers = config.latent, config.indexer, config.num_layers
    if latent is None:
        return 2 * layers * config.num_kv_heads * config.head_dim * bytes_per_number
    numbers = layers * (latent.kv_rank + latent.rope_dim)
    if indexer is not None:
        selecting = sum(not config.shares_selection(layer) for layer in range(layers))
        numbers += selecting * indexer.head_dim
    return numbers * bytes_per_number


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int]]:
    # Shapes are data: checking a recipe that names one needs no torch.
    from headrace.model.decoder import Decoder

    for name, parameter in Decoder(config, device="meta").named_parameters():
        yield name, parameter.numel()


_PARTS = (
    # First match wins: an indexer's norm belongs to the indexer.
    ("attention.indexer.", "indexers"),
    ("norm", "norms"),
    ("attention.", "attention"),
    ("feed_forward.experts.", "routed experts"),
    ("feed_forward.shared.", "shared experts"),
    ("feed_forward.router.", "routers"),
    ("feed_forward.", "dense feed-forward"),
    ("embed.", "embedding"),
    ("lm_head.", "output projection"),
)


def _part(name: str) -> str:
    """What a parameter of the main model belongs to."""
    for piece, part in _PARTS:
        if piece in name:
            return part
    raise ValueError(f"parameter {name} belongs to no known part")


def _check_fields(where: str, config: Any, changes: Mapping[str, Any]) -> None:
    known = [] if config is None else [field.name for field in fields(config)]
    for name in changes:
        if name not in known:
            raise UserError(f'{where}: unknown field "{name}"{_nearest(name, known)}')


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f'; did you mean "{close[0]}"?' if close else f"; use one of {', '.join(known)}"
