"""Operation counts against torch's own counter, and what a reading contains."""

import pytest
import torch
from law_cases import GLM5, LLAMA
from torch.utils.flop_counter import FlopCounterMode

from headrace.model.decoder import Decoder
from headrace.model.presets import PRESETS
from headrace.training.meters import (
    StepMeter,
    forward_flops,
    matmul_rate,
    memory,
    training_flops,
)


def test_linear_operations_equal_what_torch_counts():
    model = Decoder(LLAMA)
    model.init_weights(0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(torch.zeros(1, 8, dtype=torch.int64)))
    matmuls = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # Norms and the embedding look-up are parameters but no products.
    assert 8 * forward_flops(LLAMA, 8).linear == pytest.approx(matmuls, rel=0.01)


def test_attention_is_half_the_square_and_bounded_by_selection():
    dense = forward_flops(LLAMA, 64).attention
    assert dense == pytest.approx(2 * 4 * 4 * 8 * 65 / 2)
    short, long = (forward_flops(PRESETS["glm5-tiny"], n) for n in (128, 129))
    assert short.indexer < long.indexer
    tiny = PRESETS["glm5-tiny"]
    far, farther = (forward_flops(tiny, n) for n in (10_000, 20_000))
    # Only index scores go on growing.
    growth = farther.attention - far.attention
    assert growth == pytest.approx(farther.indexer - far.indexer, rel=0.02)


def test_the_released_shape_costs_two_operations_per_active_parameter():
    count = forward_flops(PRESETS["glm5"], 1)
    assert count.linear == pytest.approx(2 * 40e9, rel=0.05)
    assert training_flops(PRESETS["glm5"], 1) == pytest.approx(3 * count.forward)


def test_prediction_steps_and_frozen_parts_change_the_count():
    plain = training_flops(GLM5, 10)
    assert training_flops(GLM5, 10, mtp_steps=1) > plain
    assert training_flops(GLM5, 10, trainable="indexer") < plain / 2
    assert training_flops(GLM5, 10, trainable="all_but_indexer") < plain


def test_a_reading_has_every_number_and_starts_afresh():
    meter = StepMeter(LLAMA)
    meter.add([10, 20, 0])
    found = meter.read(2.0)
    assert found["tokens_per_s"] == 15.0
    rate = matmul_rate(torch.float32, "cpu", torch.get_num_threads())
    flops = 10 * training_flops(LLAMA, 10) + 20 * training_flops(LLAMA, 20)
    assert found["mfu"] == pytest.approx(flops / 2.0 / rate)
    assert 0 < found["memory_mb"] <= found["peak_memory_mb"] * 1.01
    assert meter.read(1.0)["tokens_per_s"] == 0.0
    assert memory().keys() <= found.keys()
