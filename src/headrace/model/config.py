"""The shape of a decoder, as data: read from and written to a Hugging Face config.json.

Everything that changes the mathematics is a field that takes part in equality, so two equal configs
compute the same function of the same weights. Token ids ride along for the engine and are ignored
by equality. What headrace cannot compute exactly is refused here, never approximated.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import UserError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MAX_POSITIONS = {"llama": 2048, "qwen3": 32768}
_ROPE_KINDS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder.

    Attributes:
        vocab_size: number of token ids, V.
        hidden_size: width of the residual stream, D.
        intermediate_size: inner width of the feed-forward.
        num_layers: number of blocks.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, Hkv; divides H.
        head_dim: width d of one head; even; H * d need not equal D.
        max_positions: most positions a sequence may have.
        rope_theta: base of the rotary frequencies.
        rope_interleaved: rotate neighbouring pairs (2i, 2i+1) instead of halves (i, i + d/2).
        norm_eps: epsilon of every RMSNorm.
        tie_embeddings: the output projection is the embedding matrix.
        qk_norm: RMSNorm over d on queries and keys before rotation (qwen3 has it, llama not).
        attention_bias: biases on the four attention projections.
        family: which Hugging Face model type the checkpoint is written as, "llama" or "qwen3".
        rope_scaling: None, or {"rope_type": "linear" | "llama3", ...} with that kind's numbers.
        attention: key of `parts.ATTENTION`.
        feed_forward: key of `parts.FEED_FORWARD`.
        bos_token_id: not part of equality; None if the tokenizer has none.
        eos_token_ids: not part of equality; ids that end a turn, possibly empty.
        pad_token_id: not part of equality.

    Raises:
        UserError: a size is not positive, heads do not divide, or an unsupported rotary scaling.
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
    attention: str = "gqa"
    feed_forward: str = "swiglu"
    bos_token_id: int | None = field(default=None, compare=False)
    eos_token_ids: tuple[int, ...] = field(default=(), compare=False)
    pad_token_id: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"model config: {name} = {value!r}; give a whole number >= 1")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UserError(f"model config: {name} = {value!r}; give a number > 0")
        if self.family not in _ARCHITECTURES:
            raise UserError(
                f"model config: family = {self.family!r} is not supported; "
                f"use one of {', '.join(_ARCHITECTURES)}"
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
                "qwen3 has query/key norms and llama has none"
            )
        _check_rope_scaling(self.rope_scaling)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """Read the contents of a Hugging Face config.json (transformers 4 or 5 spelling).

        Raises:
            UserError: another architecture, a missing or wrong field, or a feature that would
                change the result and is not implemented.
        """
        family = data.get("model_type")
        if family not in _ARCHITECTURES:
            raise UserError(
                f"config.json: model_type = {family!r} is not a supported architecture; "
                f"use a checkpoint of one of {', '.join(_ARCHITECTURES)}"
            )
        _refuse_unsupported(data)

        hidden_size, num_heads = _need(data, "hidden_size"), _need(data, "num_attention_heads")
        num_kv_heads = data.get("num_key_value_heads")
        head_dim = data.get("head_dim")
        if head_dim is None:
            head_dim = 128 if family == "qwen3" else hidden_size // max(num_heads, 1)
        theta, scaling = _read_rope(data)
        eos = data.get("eos_token_id")
        return cls(
            vocab_size=_need(data, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_need(data, "intermediate_size"),
            num_layers=_need(data, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            max_positions=data.get("max_position_embeddings", _MAX_POSITIONS[family]),
            rope_theta=theta,
            norm_eps=data.get("rms_norm_eps", 1e-6),
            tie_embeddings=bool(data.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            attention_bias=bool(data.get("attention_bias", False)),
            family=family,
            rope_scaling=scaling,
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=data.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers 4 and 5 both read as this architecture.

        Raises:
            UserError: no Hugging Face architecture of this family computes the same function.
        """
        if self.rope_interleaved or self.attention != "gqa" or self.feed_forward != "swiglu":
            raise UserError(
                f"model config: rope_interleaved = {self.rope_interleaved}, attention = "
                f"{self.attention!r}, feed_forward = {self.feed_forward!r} cannot be written as a "
                f"{self.family} checkpoint; use half rotation, gqa and swiglu"
            )
        eos = list(self.eos_token_ids)
        # Both spellings of the rotary settings: transformers 5 reads rope_parameters, 4 the others.
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        return {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": self.attention_bias,
            "rope_parameters": rope,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": self.pad_token_id,
        }

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


def _need(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        problem = "is missing" if value is None else f"= {value!r} is not a whole number"
        raise UserError(f"config.json: {name} {problem}; restore the file from its source")
    return value


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Refuse every setting that changes the result and that the decoder does not implement."""
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"config.json: hidden_act = {activation!r} is not supported; only silu is")
    if data.get("mlp_bias"):
        raise UserError("config.json: mlp_bias = true is not supported; use a model without it")
    layer_types = data.get("layer_types") or []
    if data.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise UserError(
            "config.json: sliding-window attention is not supported; use a full-attention model"
        )
    if data.get("quantization_config"):
        raise UserError(
            "config.json: quantization_config is set; use the unquantized checkpoint of this model"
        )


def _read_rope(data: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling from either spelling."""
    parameters = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise UserError(f"config.json: rope_parameters = {parameters!r} is not an object")
    theta = parameters.get("rope_theta", data.get("rope_theta", 10000.0))
    partial = parameters.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UserError(
            f"config.json: partial_rotary_factor = {partial!r} is not supported; only 1.0 is"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    scaling = {"rope_type": kind} | {
        key: parameters[key] for key in _ROPE_KINDS.get(kind, ()) if key in parameters
    }
    _check_rope_scaling(scaling)
    return theta, scaling


def _check_rope_scaling(scaling: Mapping[str, Any] | None) -> None:
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind not in _ROPE_KINDS:
        raise UserError(
            f"model config: rope_scaling rope_type = {kind!r} is not supported; "
            f"use one of default, {', '.join(_ROPE_KINDS)}"
        )
    for name in _ROPE_KINDS[kind]:
        value = scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(
                f"model config: rope_scaling {name} = {value!r}; {kind} needs a number > 0"
            )
