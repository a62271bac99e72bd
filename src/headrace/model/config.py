"""The shape of a decoder, as data.

Everything that changes the mathematics is a field that takes part in equality, so two equal configs
compute the same function of the same weights. Token ids ride along for the engine and are ignored
by equality. `hf_config` reads and writes these as Hugging Face config.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import UserError

FAMILIES = ("llama", "qwen3", "glm_moe_dsa", "deepseek_v32", "deepseek_v3")
LATENT_FAMILIES = FAMILIES[2:]
ROPE_KINDS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class LatentConfig:
    """Multi-latent attention. MLA-256 is nope_dim + rope_dim = value_dim = 256.

    Attributes:
        q_rank: width of the query latent.
        kv_rank: width R of the key/value latent; with the rotated key it is all that is cached.
        nope_dim: part of each query/key head that is not rotated.
        rope_dim: rotated part; even; its key is shared by all heads.
        value_dim: width of each value head.
        norm_eps: epsilon of the two latent norms (engines differ here: 1e-6 or 1e-5).
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _need_positive("latent", self, "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        if self.rope_dim % 2:
            raise UserError(f"model config: latent.rope_dim = {self.rope_dim}; give an even number")


@dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer of DeepSeek sparse attention.

    Attributes:
        num_heads: indexer query heads.
        head_dim: their width; the first `rope_dim` dimensions are rotated, so it is at least that.
        topk: keys each query attends to.
        shared: per layer, True where the selection of the last layer before it with False is used
            (IndexShare); empty means every layer selects for itself.
        rope_interleaved: rotate neighbouring pairs (GLM-5) or halves (DeepSeek-V3.2).
    """

    num_heads: int
    head_dim: int
    topk: int
    shared: tuple[bool, ...] = ()
    rope_interleaved: bool = True

    def __post_init__(self) -> None:
        _need_positive("indexer", self, "num_heads", "head_dim", "topk")
        object.__setattr__(self, "shared", tuple(bool(s) for s in self.shared))
        if self.shared and self.shared[0]:
            raise UserError("model config: indexer.shared[0] = True; layer 0 has none to share")


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts with a sigmoid router.

    Attributes:
        num_experts: routed experts, E.
        experts_per_token: experts each token uses, K.
        intermediate_size: inner width of one expert.
        num_shared: experts every token uses besides, fused into one.
        leading_dense: first layers that have a dense feed-forward instead.
        scaling: factor on the normalised weights of the routed experts.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared: int = 1
    leading_dense: int = 0
    scaling: float = 1.0

    def __post_init__(self) -> None:
        _need_positive("moe", self, "num_experts", "experts_per_token", "intermediate_size")
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"model config: moe.experts_per_token = {self.experts_per_token} exceeds "
                f"moe.num_experts = {self.num_experts}; lower it"
            )
        if self.leading_dense < 0 or self.num_shared < 0:
            raise UserError("model config: moe.leading_dense and moe.num_shared must be >= 0")


@dataclass(frozen=True)
class MtpConfig:
    """Multi-token prediction.

    Attributes:
        depth: prediction steps D beyond the next token.
        shared: one set of parameters for all steps (GLM-5) instead of one each (DeepSeek-V3).
    """

    depth: int = 3
    shared: bool = True

    def __post_init__(self) -> None:
        _need_positive("mtp", self, "depth")

    @property
    def stored_layers(self) -> int:
        """Sets of parameters."""
        return 1 if self.shared else self.depth


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder.

    Attributes:
        vocab_size: number of token ids, V.
        hidden_size: width of the residual stream, D.
        intermediate_size: inner width of the dense feed-forward.
        num_layers: number of blocks.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, Hkv; divides H; equal to H with `latent`.
        head_dim: width d of one query/key head; even; H * d need not equal D.
        max_positions: most positions a sequence may have.
        rope_theta: base of the rotary frequencies.
        rope_interleaved: rotate neighbouring pairs (2i, 2i+1) instead of halves (i, i + d/2).
        norm_eps: epsilon of the RMSNorms, the latent ones excepted.
        tie_embeddings: the output projection is the embedding matrix.
        qk_norm: RMSNorm over d on queries and keys before rotation (qwen3 has it, llama not).
        attention_bias: biases on the four attention projections.
        family: which Hugging Face model type the checkpoint is written as; one of `FAMILIES`.
        rope_scaling: None, or {"rope_type": "linear" | "llama3", ...} with that kind's numbers.
        latent: multi-latent instead of grouped-query attention.
        indexer: sparse attention over the keys a lightning indexer selects; needs `latent`.
        moe: mixture of experts instead of the dense feed-forward; needs `latent`.
        mtp: multi-token prediction layers; needs `latent`.
        bos_token_id: not part of equality; None if the tokenizer has none.
        eos_token_ids: not part of equality; ids that end a turn, possibly empty.
        pad_token_id: not part of equality.

    Raises:
        UserError: a size is not positive, or fields that do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rope_interleaved: bool = False
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    family: str = "llama"
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    latent: LatentConfig | None = None
    indexer: IndexerConfig | None = None
    moe: MoeConfig | None = None
    mtp: MtpConfig | None = None
    bos_token_id: int | None = field(default=None, compare=False)
    eos_token_ids: tuple[int, ...] = field(default=(), compare=False)
    pad_token_id: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, kind in _NESTED.items():
            if isinstance(value := getattr(self, name), Mapping):
                # As it arrives from another process or a JSON file.
                object.__setattr__(self, name, kind(**value))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        _need_positive(
            "",
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UserError(f"model config: {name} = {value!r}; give a number > 0")
        if self.family not in FAMILIES:
            raise UserError(
                f"model config: family = {self.family!r} is not supported; "
                f"use one of {', '.join(FAMILIES)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model config: num_kv_heads = {self.num_kv_heads} does not divide "
                f"num_heads = {self.num_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise UserError(
                f"model config: head_dim = {self.head_dim} is odd; rotary needs an even one"
            )
        if self.qk_norm != (self.family == "qwen3"):
            raise UserError(
                f"model config: qk_norm = {self.qk_norm} does not fit family = {self.family!r}; "
                "qwen3 has query/key norms and the others have none"
            )
        check_rope_scaling(self.rope_scaling)
        if (self.latent is not None) != (self.family in LATENT_FAMILIES):
            raise UserError(
                f"model config: family = {self.family!r} with latent = {self.latent!r}; "
                f"{', '.join(LATENT_FAMILIES)} have latent attention and the others have none"
            )
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.indexer or self.moe or self.mtp:
            raise UserError("model config: indexer, moe and mtp need latent attention; set latent")

    def _check_latent(self, latent: LatentConfig) -> None:
        expected = {
            "head_dim": latent.nope_dim + latent.rope_dim,
            "num_kv_heads": self.num_heads,
            "rope_interleaved": True,
            "family": latent_family(self.indexer),
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise UserError(
                    f"model config: {name} = {getattr(self, name)!r}; "
                    f"with these latent and indexer settings it must be {value!r}"
                )
        indexer, moe = self.indexer, self.moe
        if indexer is not None and indexer.head_dim < latent.rope_dim:
            raise UserError(
                f"model config: indexer.head_dim = {indexer.head_dim} is smaller than "
                f"latent.rope_dim = {latent.rope_dim}; raise it"
            )
        if indexer is not None and len(indexer.shared) not in (0, self.num_layers):
            raise UserError(
                f"model config: indexer.shared has {len(indexer.shared)} entries for "
                f"{self.num_layers} layers; give one per layer or none"
            )
        if indexer is not None and any(indexer.shared) and not indexer.rope_interleaved:
            raise UserError(
                "model config: indexer.shared with rope_interleaved = False: deepseek_v32 "
                "checkpoints have an indexer in every layer; leave shared empty"
            )
        if moe is not None and moe.leading_dense >= self.num_layers:
            raise UserError(
                f"model config: moe.leading_dense = {moe.leading_dense} leaves no layer of "
                f"{self.num_layers} with experts; lower it or leave moe out"
            )

    @property
    def attention(self) -> str:
        """Key of `parts.ATTENTION`."""
        return "gqa" if self.latent is None else "mla"

    def feed_forward(self, layer: int) -> str:
        """Key of `parts.FEED_FORWARD` for one layer; MTP layers come after the last."""
        return "moe" if self.moe is not None and layer >= self.moe.leading_dense else "swiglu"

    @property
    def rope_dim(self) -> int:
        """Rotated width of a head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def shares_selection(self, layer: int) -> bool:
        """Whether `layer` attends over an earlier layer's selection."""
        indexer = self.indexer
        return indexer is not None and layer < len(indexer.shared) and indexer.shared[layer]

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """See `hf_config.read_config`."""
        from headrace.model.hf_config import read_config

        return read_config(data)

    def to_hf(self) -> dict[str, Any]:
        """See `hf_config.write_config`."""
        from headrace.model.hf_config import write_config

        return write_config(self)

    @classmethod
    def from_file(cls, directory: str | Path) -> "ModelConfig":
        """Read `directory`/config.json.

        Raises:
            UserError: the file is missing, is not JSON, or `from_hf` refuses it.
        """
        path = Path(directory) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"checkpoint {directory}: cannot read config.json ({error.strerror}); "
                "give a Hugging Face checkpoint directory"
            ) from error
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON ({error}); restore the file") from error
        if not isinstance(data, dict):
            raise UserError(f"{path} holds no JSON object; restore the file")
        try:
            return cls.from_hf(data)
        except UserError as error:
            raise UserError(f"checkpoint {directory}: {error}") from error


_NESTED = {"latent": LatentConfig, "indexer": IndexerConfig, "moe": MoeConfig, "mtp": MtpConfig}


def latent_family(indexer: IndexerConfig | None) -> str:
    """The Hugging Face model type of a latent-attention model with this indexer."""
    if indexer is None:
        return "deepseek_v3"
    return "glm_moe_dsa" if indexer.rope_interleaved else "deepseek_v32"


def check_rope_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Raises UserError when a rotary scaling is unknown or incomplete."""
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind not in ROPE_KINDS:
        raise UserError(
            f"model config: rope_scaling rope_type = {kind!r} is not supported; "
            f"use one of default, {', '.join(ROPE_KINDS)}"
        )
    for name in ROPE_KINDS[kind]:
        value = scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(
                f"model config: rope_scaling {name} = {value!r}; {kind} needs a number > 0"
            )


def _need_positive(table: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            where = f"{table}.{name}" if table else name
            raise UserError(f"model config: {where} = {value!r}; give a whole number >= 1")
