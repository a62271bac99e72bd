"""config.json in both spellings, and refusals instead of approximations."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.model.config import ModelConfig

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": [1, 2],
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_reads_the_older_spelling() -> None:
    config = ModelConfig.from_hf(HF)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (8, 2, 5000.0)
    assert config.eos_token_ids == (1, 2)
    assert config.bos_token_id is None


def test_both_rope_spellings_agree() -> None:
    newer = {key: value for key, value in HF.items() if key != "rope_theta"}
    newer["rope_parameters"] = {**SCALING, "rope_theta": 5000.0}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf({**HF, "rope_scaling": SCALING})
    assert ModelConfig.from_hf(newer) != ModelConfig.from_hf(HF)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": SCALING},
        {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {"attention_bias": True, "eos_token_id": 3, "bos_token_id": 0, "pad_token_id": 3},
    ],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**HF, **changes})
    again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config
    assert vars(again) == vars(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba' is not a supported architecture"),
        ({"model_type": None}, "model_type = None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "unquantized"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None"),
        ({"rope_scaling": 3}, "rope_parameters = 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size = 'many' is not a whole number"),
        ({"num_hidden_layers": 0}, "num_layers = 0"),
        ({"num_attention_heads": 0}, "num_heads = 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"rms_norm_eps": "small"}, "norm_eps = 'small'"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
    ],
)
def test_refusals_name_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf({**HF, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


LATENT_HF: dict[str, Any] = {
    **{key: value for key, value in HF.items() if key != "num_key_value_heads"},
    "model_type": "glm_moe_dsa",
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 5,
    "num_nextn_predict_layers": 1,
}


def test_head_dim_does_not_overwrite_the_rotated_width() -> None:
    for head_dim in (4, 10, 256):
        config = ModelConfig.from_hf({**LATENT_HF, "head_dim": head_dim})
        assert (config.rope_dim, config.head_dim) == (4, 10)
    # transformers computes rotary frequencies for what it finds under this name.
    assert config.to_hf()["head_dim"] == 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "deepseek_v32"},
        {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0},
        {"indexer_types": ["full", "shared"], "latent_norm_eps": 1e-5},
        {"first_k_dense_replace": 2, "mtp_depth": 3, "mtp_shared": True},
        {"num_nextn_predict_layers": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    ],
)
def test_latent_round_trip(changes: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**LATENT_HF, **changes})
    again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config
    assert vars(again) == vars(config)


def test_spellings_of_shared_selections() -> None:
    four = {**LATENT_HF, "num_hidden_layers": 4}
    for spelling in (
        {"indexer_types": ["full", "shared", "shared", "full"]},
        {"index_topk_pattern": "FSSF"},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    ):
        config = ModelConfig.from_hf({**four, **spelling})
        assert config.indexer is not None
        assert config.indexer.shared == (False, True, True, False)
        other = ModelConfig.from_hf({**four, **spelling, "model_type": "deepseek_v32"})
        assert other.indexer is not None
        assert other.indexer.shared == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 2}, "n_group = 2 (group-limited routing)"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"attention_bias": True}, "attention_bias"),
        ({"qk_rope_head_dim": 3}, "latent.rope_dim = 3"),
        ({"indexer_types": ["full", "some"]}, "indexer_types has 'some'"),
        ({"indexer_types": ["shared", "full"]}, "indexer.shared[0]"),
        ({"indexer_types": ["full"]}, "indexer_types has 1 entries for 2 layers"),
        ({"index_head_dim": 2}, "indexer.head_dim = 2 is smaller"),
        ({"index_topk": 0}, "indexer.topk = 0"),
        ({"num_experts_per_tok": 5}, "moe.experts_per_token = 5 exceeds"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    ],
)
def test_latent_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf({**LATENT_HF, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_family_and_qk_norm_must_fit() -> None:
    with pytest.raises(UserError, match="qk_norm = True does not fit family = 'llama'"):
        ModelConfig(10, 8, 16, 1, 2, 1, 4, qk_norm=True)


def test_what_hugging_face_cannot_say_is_refused() -> None:
    config = ModelConfig(10, 8, 16, 1, 2, 1, 4, rope_interleaved=True)
    with pytest.raises(UserError, match="rope_interleaved = True"):
        config.to_hf()


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        ModelConfig.from_file(tmp_path)
