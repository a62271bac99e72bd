"""Named shapes, their parameter counts against a closed form, and the command that prints them."""

import time
from dataclasses import replace

import pytest

from headrace.cli import main
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import IndexerConfig, ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.presets import PRESETS, cache_bytes_per_token, count_parameters, preset


def closed_form(config: ModelConfig) -> tuple[int, int, int]:
    """(total, active, prediction layers) from the config's numbers alone."""
    latent, moe, indexer, mtp = config.latent, config.moe, config.indexer, config.mtp
    assert latent
    assert moe
    assert mtp
    size, heads = config.hidden_size, config.num_heads
    attention = (
        size * latent.q_rank
        + latent.q_rank
        + latent.q_rank * heads * (latent.nope_dim + latent.rope_dim)
        + size * (latent.kv_rank + latent.rope_dim)
        + latent.kv_rank
        + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        + heads * latent.value_dim * size
    )
    if indexer:
        attention += (
            latent.q_rank * indexer.num_heads * indexer.head_dim
            + (size + 2) * indexer.head_dim
            + size * indexer.num_heads
        )
    expert = 3 * size * moe.intermediate_size
    always = attention + 2 * size + moe.num_experts * size + moe.num_shared * expert
    sparse, dense = config.num_layers - moe.leading_dense, moe.leading_dense
    dense_layers = dense * (attention + 2 * size + 3 * size * config.intermediate_size)
    embedding = config.vocab_size * size
    matrices = 1 if config.tie_embeddings else 2
    total = (
        matrices * embedding + size + dense_layers + sparse * (always + moe.num_experts * expert)
    )
    active = embedding + size + dense_layers + sparse * (always + moe.experts_per_token * expert)
    layer = always + moe.num_experts * expert + 2 * size * size + 3 * size
    return total, active, mtp.stored_layers * layer


@pytest.mark.parametrize("name", PRESETS)
def test_counts_equal_the_closed_form(name: str) -> None:
    for config in (preset(name), preset(name, indexer=None, mtp={"depth": 2, "shared": False})):
        count = count_parameters(config)
        assert (count.total, count.active, count.mtp) == closed_form(config)
        assert sum(count.by_part.values()) == count.total


def test_the_released_shape_is_744b_with_40b_active() -> None:
    before = time.process_time()
    model = Decoder(preset("glm5"), device="meta")
    assert time.process_time() - before < 30
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    count = count_parameters(model.config)
    assert model.num_parameters() == count.stored
    assert count.total == pytest.approx(744e9, rel=0.005)
    assert count.active == pytest.approx(40e9, rel=0.03)
    assert count.mtp == pytest.approx(10e9, rel=0.01)


def test_small_presets_are_small_and_the_mini_about_100m() -> None:
    tiny, mini = count_parameters(preset("glm5-tiny")), count_parameters(preset("glm5-mini"))
    assert 2e6 < tiny.stored < 4e6
    assert mini.stored == pytest.approx(100e6, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_config_json(name: str) -> None:
    config = preset(name)
    assert config.family == "glm_moe_dsa"
    assert config.latent
    assert config.latent.nope_dim + config.latent.rope_dim == config.latent.value_dim
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_overrides_keep_the_rest_consistent() -> None:
    config = preset(
        "glm5-tiny", 300, num_heads=6, latent={"nope_dim": 40}, moe={"num_experts": 4}, mtp=None
    )
    assert (config.vocab_size, config.num_kv_heads, config.head_dim) == (300, 6, 56)
    moe = PRESETS["glm5-tiny"].moe
    assert moe
    assert config.moe == replace(moe, num_experts=4)
    assert config.mtp is None
    assert preset("glm5-tiny", indexer=None).family == "deepseek_v3"
    halves = IndexerConfig(4, 32, 16, rope_interleaved=False)
    assert preset("glm5-tiny", indexer=halves).family == "deepseek_v32"


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("glm6-tiny",), {}, 'model preset "glm6-tiny" is unknown; did you mean "glm5-tiny"?'),
        (("glm5",), {"num_layer": 3}, 'unknown field "num_layer"; did you mean "num_layers"?'),
        (("glm5",), {"moe": {"expert": 3}}, 'moe: unknown field "expert"; did you mean'),
        (("glm5-tiny", 0), {}, "vocab_size = 0"),
    ],
)
def test_mistakes_name_the_nearest(arguments, changes, message) -> None:
    with pytest.raises(UserError) as caught:
        preset(*arguments, **changes)
    assert message in str(caught.value)


def test_cache_size_counts_latents_and_the_keys_of_layers_that_select() -> None:
    config = preset("glm5-tiny")
    assert cache_bytes_per_token(config) == 2 * 4 * (64 + 16 + 32)
    shared = preset("glm5-tiny", indexer={"shared": (False, True, True, False)})
    assert cache_bytes_per_token(shared) == 2 * (4 * (64 + 16) + 2 * 32)
    llama = ModelConfig(10, 8, 16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6)
    assert cache_bytes_per_token(llama, bytes_per_number=4) == 4 * 3 * 2 * 2 * 6


def test_the_command_prints_a_shape(capsys, tmp_path) -> None:
    assert main(["model", "glm5"]) == 0
    text = capsys.readouterr().out
    for piece in ("744B", "40.8B", "8 of 256 experts", "109,824 bytes", "1.51 TB"):
        assert piece in text
    config = ModelConfig(61, 48, 80, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8)
    model = Decoder(config)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "saved")
    assert main(["model", str(tmp_path / "saved")]) == 0
    assert "6 heads of 8, 2 for keys and values" in capsys.readouterr().out
    assert main(["model", "glm5-tyni"]) == 2
    assert 'did you mean "glm5-tiny"?' in capsys.readouterr().err
