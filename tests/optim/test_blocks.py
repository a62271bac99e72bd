"""A decoder's matrices, cut as an unfused model would have them, and by head."""

import pytest
from sharded_steps import tiny_model
from torch import nn

from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.optim.blocks import RowSplit, matrix_blocks


def named(model, **options):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: split for parameter, split in matrix_blocks(model, **options)}


def grouped_query_model():
    model = Decoder(
        ModelConfig(
            vocab_size=30,
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=4,
            tie_embeddings=True,
        )
    )
    model.init_weights(0)
    return model


def test_grouped_query_attention_by_role_or_by_head():
    layer = {
        "feed_forward.gate_up.weight": RowSplit((24, 24)),
        "feed_forward.down.weight": RowSplit((16,)),
        "attention.output.weight": RowSplit((16,)),
    }
    for by_head, qkv in ((False, RowSplit((16, 8, 8))), (True, RowSplit((4,), 8))):
        wanted = {**layer, "attention.qkv.weight": qkv}
        assert named(grouped_query_model(), split_qkv_heads=by_head) == {
            f"layers.{index}.{name}": split for index in (0, 1) for name, split in wanted.items()
        }


ATTENTION = {
    "q_down": RowSplit((14,)),
    "q_up": RowSplit((12,), 3),
    "kv_down": RowSplit((10, 4)),
    "kv_up": RowSplit((8, 6), 3),
    "output": RowSplit((20,)),
}
INDEXER = {"q_up": RowSplit((8,), 2), "key": RowSplit((8,))}
MOE = {
    "experts.gate_up": RowSplit((16, 16)),
    "experts.down": RowSplit((20,)),
    "shared.gate_up.weight": RowSplit((16, 16)),
    "shared.down.weight": RowSplit((20,)),
}


def latent_blocks(attention, indexer):
    wanted = {"mtp.layers.0.join.weight": RowSplit((20,))}
    for prefix in ("layers.0", "layers.1", "mtp.layers.0.block"):
        for name, split in attention.items():
            wanted[f"{prefix}.attention.{name}.weight"] = split
    for prefix in ("layers.0", "mtp.layers.0.block"):
        for name, split in indexer.items():
            wanted[f"{prefix}.attention.indexer.{name}.weight"] = split
    for prefix in ("layers.1", "mtp.layers.0.block"):
        for name, split in MOE.items():
            wanted[f"{prefix}.feed_forward.{name}"] = split
    wanted["layers.0.feed_forward.gate_up.weight"] = RowSplit((28, 28))
    wanted["layers.0.feed_forward.down.weight"] = RowSplit((20,))
    return wanted


def test_muon_split_cuts_up_projections_by_head():
    assert named(tiny_model()) == latent_blocks(ATTENTION, INDEXER)


def test_plain_muon_takes_each_role_whole():
    attention = {
        **ATTENTION,
        "q_up": RowSplit((36,)),
        "kv_up": RowSplit((8, 6), 3, joined=True),
    }
    indexer = {**INDEXER, "q_up": RowSplit((16,))}
    assert named(tiny_model(), split="matrix") == latent_blocks(attention, indexer)


def test_a_model_that_does_not_fit_its_config_is_refused():
    model = tiny_model()
    attention = model.get_submodule("layers.0.attention")
    attention.kv_up = nn.Linear(10, 36, bias=False)  # the config says 42 rows
    with pytest.raises(ValueError, match=r"kv_up.*36 rows"):
        matrix_blocks(model)
