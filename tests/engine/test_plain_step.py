"""The plain step equals the decoder, and its absence changes nothing but speed."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import ask, drain, greedy_reference, new_core, output, random_prompt, tiny_model

from headrace.engine import plain_step
from headrace.engine.cache.grouped import GroupedCache
from headrace.engine.cache.paged import PagedBatch
from headrace.engine.plain_step import PlainStep
from headrace.model.decoder import Decoder
from headrace.ops.native import build

torch.set_num_threads(1)

BLOCK, EACH = 8, 5
"""Tokens of a block, and blocks of a sequence."""

SHAPES = {
    "gqa": {},
    "mha, odd sizes": {"num_kv_heads": 4, "hidden_size": 44, "head_dim": 10, "vocab_size": 101},
    "common head": {"hidden_size": 96, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32},
    "qk norm": {"qk_norm": True, "family": "qwen3"},
    "bias, untied": {"attention_bias": True, "tie_embeddings": False},
    "interleaved": {"rope_interleaved": True},
}


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty compile cache; returns its directory."""
    build.unavailable_reason()  # The native library comes from the usual one.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain_step._library.cache_clear()
    yield tmp_path / "headrace"
    plain_step._library.cache_clear()


def new_cache(model: Decoder, sequences: int) -> GroupedCache:
    shape = model.config
    return GroupedCache(
        layers=shape.num_layers,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        blocks=sequences * EACH,
        block_tokens=BLOCK,
        dtype=torch.float32,
    )


def new_step(model: Decoder, cache: GroupedCache) -> PlainStep:
    step = PlainStep.create(model, cache, BLOCK * EACH)
    if step is None:
        pytest.skip("no C compiler on this machine")
    return step


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_logits_equal_the_decoder_at_every_batch_size_and_length(shape: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = tiny_model(3, **shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    rows, vocab = 19, model.config.vocab_size
    cache, other = new_cache(model, rows), new_cache(model, rows)
    step = new_step(model, cache)
    for mine, theirs in ((cache.keys, other.keys), (cache.values, other.values)):
        theirs.copy_(mine.normal_())
    lengths = torch.arange(rows) % 17
    scattered = torch.randperm(rows * EACH).view(rows, EACH).to(torch.int32)
    for count in (rows, 16, 9, 8, 3, 2, 1):
        for _ in range(3):
            ids, tables = torch.randint(0, vocab, (count,)), scattered[:count]
            batch = PagedBatch.of(lengths[:count].tolist(), [1] * count, tables, BLOCK)
            got = step(ids, batch.positions, tables)
            other.begin(batch)
            want = model.logits(model(ids[None], batch.positions[None], other))[0]
            assert torch.allclose(got.log_softmax(-1), want.log_softmax(-1), atol=1e-4)
            lengths[:count] += 1
    assert torch.allclose(cache.keys, other.keys, atol=1e-4)
    assert torch.allclose(cache.values, other.values, atol=1e-4)


@torch.inference_mode()
def test_weights_changed_without_repacking_are_noticed_by_the_check() -> None:
    model = tiny_model()
    step = new_step(model, new_cache(model, 2))
    assert step._error() < 1e-4
    model.layers[0].feed_forward.down.weight.mul_(3.0)  # type: ignore[union-attr]  # ModuleList is untyped
    assert step._error() > 1e-2
    step.repack()
    assert step._error() < 1e-4


@pytest.mark.parametrize("script", ["exit 3", "exit 0"])
def test_a_compiler_that_fails_leaves_the_others(
    script: str, fresh_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    model = tiny_model()
    assert PlainStep.create(model, new_cache(model, 2), BLOCK * EACH) is None
    core = new_core(model)
    core.add(ask("r", random_prompt(0, 9)))
    assert output(drain(core)["r"]) == greedy_reference(model, random_prompt(0, 9), 8)
    assert list(fresh_library.iterdir()) == []


def test_compiled_once_and_then_found(fresh_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    new_step(model, new_cache(model, 2))
    (built,) = fresh_library.iterdir()
    before = built.stat().st_mtime_ns
    plain_step._library.cache_clear()
    new_step(model, new_cache(model, 2))
    assert built.stat().st_mtime_ns == before


def test_other_models_and_several_threads_are_not_for_it() -> None:
    model = tiny_model()
    half = tiny_model().to(torch.bfloat16)
    assert PlainStep.create(half, new_cache(model, 2), BLOCK * EACH) is None
    torch.set_num_threads(2)
    try:
        assert PlainStep.create(model, new_cache(model, 2), BLOCK * EACH) is None
    finally:
        torch.set_num_threads(1)
