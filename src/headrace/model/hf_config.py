"""Model configs as Hugging Face config.json, both ways.

What headrace cannot compute exactly is refused here, never approximated. Both spellings of the
rotary settings are read and written: transformers 5 has `rope_parameters`, 4 has the others.
"""

from collections.abc import Mapping
from typing import Any

from headrace.errors import UserError
from headrace.model.config import (
    FAMILIES,
    LATENT_FAMILIES,
    ROPE_KINDS,
    IndexerConfig,
    LatentConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    check_rope_scaling,
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_MAX_POSITIONS = {
    "llama": 2048,
    "qwen3": 32768,
    "glm_moe_dsa": 202752,
    "deepseek_v32": 163840,
    "deepseek_v3": 4096,
}
_NORM_EPS = {"glm_moe_dsa": 1e-5}
_LATENT_NORM_EPS = 1e-6
"""What transformers' modelling code hard-wires for the latent norms."""


def read_config(data: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a Hugging Face config.json (transformers 4 or 5 spelling).

    Raises:
        UserError: another architecture, a missing or wrong field, or a feature that would change
            the result and is not implemented.
    """
    family = data.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"config.json: model_type = {family!r} is not a supported architecture; "
            f"use a checkpoint of one of {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(data)
    theta, scaling = _read_rope(data)
    eos = data.get("eos_token_id")
    common: dict[str, Any] = {
        "vocab_size": _need(data, "vocab_size"),
        "hidden_size": _need(data, "hidden_size"),
        "intermediate_size": _need(data, "intermediate_size"),
        "num_layers": _need(data, "num_hidden_layers"),
        "num_heads": _need(data, "num_attention_heads"),
        "max_positions": data.get("max_position_embeddings", _MAX_POSITIONS[family]),
        "rope_theta": theta,
        "norm_eps": data.get("rms_norm_eps", _NORM_EPS.get(family, 1e-6)),
        "tie_embeddings": bool(data.get("tie_word_embeddings", False)),
        "family": family,
        "rope_scaling": scaling,
        "bos_token_id": data.get("bos_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "pad_token_id": data.get("pad_token_id"),
    }
    if family in LATENT_FAMILIES:
        return ModelConfig(**common, **_read_latent(data, family, common["num_layers"]))
    num_heads, num_kv_heads = common["num_heads"], data.get("num_key_value_heads")
    head_dim = data.get("head_dim")
    if head_dim is None:
        head_dim = 128 if family == "qwen3" else common["hidden_size"] // max(num_heads, 1)
    return ModelConfig(
        **common,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        qk_norm=family == "qwen3",
        attention_bias=bool(data.get("attention_bias", False)),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json that transformers 4 and 5 both read as this architecture.

    Raises:
        UserError: no Hugging Face architecture of this family computes the same function.
    """
    if config.rope_interleaved and config.latent is None:
        raise UserError(
            f"model config: rope_interleaved = True cannot be written as a {config.family} "
            "checkpoint; use half rotation"
        )
    eos = list(config.eos_token_ids)
    rope = {
        "rope_type": "default",
        **(config.rope_scaling or {}),
        "rope_theta": config.rope_theta,
    }
    data: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        # In latent families `head_dim` is what rotary embeddings are computed for.
        "head_dim": config.rope_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
    }
    if config.latent is not None:
        data |= _write_latent(config, config.latent)
    return data


def _read_latent(data: Mapping[str, Any], family: str, num_layers: int) -> dict[str, Any]:
    """Constructor arguments that only latent-attention models have."""
    for name in ("n_group", "topk_group"):
        if data.get(name, 1) != 1:
            raise UserError(
                f"config.json: {name} = {data[name]!r} (group-limited routing) is not supported; "
                "only 1 is"
            )
    if not data.get("norm_topk_prob", True):
        raise UserError("config.json: norm_topk_prob = false is not supported; only true is")
    if family == "deepseek_v3" and not data.get("rope_interleave", True):
        raise UserError("config.json: rope_interleave = false is not supported; only true is")
    latent = LatentConfig(
        q_rank=_need(data, "q_lora_rank"),
        kv_rank=_need(data, "kv_lora_rank"),
        nope_dim=_need(data, "qk_nope_head_dim"),
        rope_dim=_need(data, "qk_rope_head_dim"),
        value_dim=_need(data, "v_head_dim"),
        norm_eps=data.get("latent_norm_eps", _LATENT_NORM_EPS),
    )
    # The file's own head_dim is another spelling of qk_rope_head_dim and must not override it.
    return {
        "num_kv_heads": _need(data, "num_attention_heads"),
        "head_dim": latent.nope_dim + latent.rope_dim,
        "rope_interleaved": True,
        "latent": latent,
        "indexer": None if family == "deepseek_v3" else _read_indexer(data, family, num_layers),
        "moe": _read_moe(data, num_layers),
        "mtp": _read_mtp(data),
    }


def _read_indexer(data: Mapping[str, Any], family: str, num_layers: int) -> IndexerConfig:
    # In deepseek_v32 every layer has an indexer, whatever such fields say.
    kinds = data.get("indexer_types") if family == "glm_moe_dsa" else ["full"] * num_layers
    if kinds is None and (pattern := data.get("index_topk_pattern")) is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        frequency = max(data.get("index_topk_freq", 1) or 1, 1)
        offset = data.get("index_skip_topk_offset", 2)
        kinds = [
            "full" if max(layer - offset + 1, 0) % frequency == 0 else "shared"
            for layer in range(num_layers)
        ]
    unknown = sorted({str(kind) for kind in kinds} - {"full", "shared"})
    if unknown:
        raise UserError(
            f"config.json: indexer_types has {unknown[0]!r}; each entry is 'full' or 'shared'"
        )
    if len(kinds) < num_layers:
        raise UserError(
            f"config.json: indexer_types has {len(kinds)} entries for {num_layers} layers; "
            "give one per layer"
        )
    shared = tuple(kind == "shared" for kind in kinds[:num_layers])
    return IndexerConfig(
        num_heads=_need(data, "index_n_heads"),
        head_dim=_need(data, "index_head_dim"),
        topk=_need(data, "index_topk"),
        shared=shared if any(shared) else (),
        rope_interleaved=family == "glm_moe_dsa",
    )


def _read_moe(data: Mapping[str, Any], num_layers: int) -> MoeConfig | None:
    kinds = data.get("mlp_layer_types")
    leading = data.get("first_k_dense_replace", 3)
    if kinds is not None:
        leading = next((i for i, kind in enumerate(kinds) if kind == "sparse"), num_layers)
        if any(kind != "sparse" for kind in kinds[leading:num_layers]):
            raise UserError(
                "config.json: mlp_layer_types has dense layers after sparse ones, which is not "
                "supported; only leading layers may be dense"
            )
    if leading >= num_layers:
        return None
    return MoeConfig(
        num_experts=_need(data, "n_routed_experts"),
        experts_per_token=_need(data, "num_experts_per_tok"),
        intermediate_size=_need(data, "moe_intermediate_size"),
        num_shared=data.get("n_shared_experts") or 0,
        leading_dense=leading,
        scaling=float(data.get("routed_scaling_factor", 1.0)),
    )


def _read_mtp(data: Mapping[str, Any]) -> MtpConfig | None:
    stored = data.get("num_nextn_predict_layers") or 0
    if stored == 0:
        return None
    # Only one layer's weights exist in checkpoints whose steps share them; how many steps it was
    # trained for is not a field of transformers. Without it, the file's count is taken.
    depth = data.get("mtp_depth", stored)
    return MtpConfig(depth=depth, shared=bool(data.get("mtp_shared", stored == 1)))


def _write_latent(config: ModelConfig, latent: LatentConfig) -> dict[str, Any]:
    moe, indexer, mtp = config.moe, config.indexer, config.mtp
    layers = config.num_layers
    leading = layers if moe is None else moe.leading_dense
    data: dict[str, Any] = {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_head_dim": latent.nope_dim + latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "latent_norm_eps": latent.norm_eps,
        "rope_interleave": True,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": leading,
        "mlp_layer_types": ["dense"] * leading + ["sparse"] * (layers - leading),
        "num_nextn_predict_layers": 0 if mtp is None else mtp.stored_layers,
    }
    if moe is not None:
        data |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
            "n_shared_experts": moe.num_shared,
            "routed_scaling_factor": moe.scaling,
        }
    if indexer is not None:
        shared = indexer.shared or (False,) * layers
        data |= {
            "index_n_heads": indexer.num_heads,
            "index_head_dim": indexer.head_dim,
            "index_topk": indexer.topk,
            "indexer_types": ["shared" if s else "full" for s in shared],
        }
    if mtp is not None:
        data |= {"mtp_depth": mtp.depth, "mtp_shared": mtp.shared}
    return data


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
    if data.get("attention_bias") and data.get("model_type") in LATENT_FAMILIES:
        raise UserError(
            "config.json: attention_bias = true is not supported with latent attention; "
            "use a model without it"
        )
    layer_types = data.get("layer_types") or []
    known = ("full_attention", "indexed_attention")
    if data.get("use_sliding_window") or any(kind not in known for kind in layer_types):
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
        key: parameters[key] for key in ROPE_KINDS.get(kind, ()) if key in parameters
    }
    check_rope_scaling(scaling)
    return theta, scaling
