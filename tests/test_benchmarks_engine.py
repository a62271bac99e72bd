"""The parts of the engine's benchmarks that compare and bound, and the processes they compare."""

import argparse
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

import engine_throughput
import latent_decode
import peer_process
import report
from engine_throughput import Limits, Rate, Workload
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import EngineError
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.gguf_import import _to_halves
from headrace.model.presets import preset
from peers.llama_file import to_pairs, write_gguf

PEERS = peer_process.SCRIPTS


def rates(*rows: tuple[str, int, int, float]) -> list[Rate]:
    """(side, concurrency, round, tokens per second) of one workload."""
    return [Rate(side, c, "short_shared", number, value) for side, c, number, value in rows]


def test_ratio_is_to_the_best_of_its_own_round() -> None:
    found = rates(
        *(("headrace", 1, 0, 10.0), ("vllm", 1, 0, 5.0), ("llama", 1, 0, 8.0)),
        *(("headrace", 1, 1, 20.0), ("vllm", 1, 1, 16.0)),
        *(("headrace", 1, 2, 12.0), ("vllm", 1, 2, 4.0), ("llama_quantised", 1, 2, 99.0)),
    )
    metrics = engine_throughput.metrics_of(found)
    # Per round 10/8, 20/16, 12/4; a side of lower precision is never the best.
    assert metrics["ratio_vs_best_c1"] == pytest.approx(1.25)
    assert metrics["ratio_vs_best_c1_short_shared"] == pytest.approx(1.25)
    assert metrics["ratio_vs_vllm_c1"] == pytest.approx(2.0)
    assert metrics["ratio_vs_llama_c1"] == pytest.approx(1.25)
    assert metrics["tokens_per_s_headrace_c1"] == 12.0
    assert not any("headrace" in name for name in metrics if name.startswith("ratio"))


def test_roofline_takes_the_slower_bound_of_the_same_round() -> None:
    parameters = 1000
    limits = [
        Limits(1, "short_shared", 0, read_bytes=20_000.0, reread_bytes=40_000.0, matmul_flops=1.0),
        Limits(64, "short_shared", 0, 20_000.0, 40_000.0, matmul_flops=64_000.0),
    ]
    found = [
        Rate("headrace", 1, "short_shared", 0, 1.0, decode_tokens_per_s=7.0),
        Rate("headrace", 64, "short_shared", 0, 1.0, decode_tokens_per_s=16.0),
        Rate("vllm", 1, "short_shared", 0, 9.0),
    ]
    metrics = engine_throughput.roofline_metrics(
        found, limits, parameters, lambda concurrency, _: concurrency * 1000.0
    )
    # 2000 bytes at 20 kB/s: ten steps a second. 128,000 operations at 64,000: half a step.
    assert metrics["roofline_tokens_per_s_c1"] == pytest.approx(10.0)
    assert metrics["roofline_c1"] == pytest.approx(0.7)
    assert metrics["roofline_reread_c1"] == pytest.approx(0.35)
    assert metrics["roofline_held_c1"] == pytest.approx(1.05)  # 3000 bytes
    assert metrics["roofline_tokens_per_s_c64"] == pytest.approx(32.0)
    assert metrics["roofline_c64"] == pytest.approx(0.5)
    # 66,000 bytes take 3.3 s, longer than two of operations.
    assert metrics["roofline_held_tokens_per_s_c64"] == pytest.approx(64 / 3.3)


def test_prompts_are_shared_or_distinct_and_new_each_round() -> None:
    shared, distinct = (Workload("short", kind, 4, 1) for kind in ("shared", "distinct"))
    same = engine_throughput.new_prompts(shared, 16, "a", 500)
    assert len(same) == 16
    assert all(prompt == same[0] for prompt in same)
    other = engine_throughput.new_prompts(distinct, 16, "a", 500)
    assert len({tuple(prompt) for prompt in other}) == 16
    assert engine_throughput.new_prompts(distinct, 16, "a", 500) == other
    assert engine_throughput.new_prompts(distinct, 16, "b", 500) != other
    assert len(engine_throughput.new_prompts(distinct, 1, "a", 500)) == 2


def test_unknown_side_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine_throughput.parse(["--threads-of", "vlm=1"])
    assert "'vlm=1' must be SIDE=N" in capsys.readouterr().err


def test_report_rounds_numbers_but_not_counts() -> None:
    assert report.rounded({"a": 1.2345678, "b": 1234567.0}) == {"a": 1.2346, "b": 1234567.0}
    arguments = argparse.Namespace(quick=True, steps=None, rows=7)
    report.fill_sizes(arguments, (("steps", 2, 20), ("rows", 1, 10)))
    assert (arguments.steps, arguments.rows) == (2, 7)


# -- processes ------------------------------------------------------------------------------------

PEER = """
import os, subprocess, sys, time
from lines import options, serve
given = options()
print("noise of a library")
child = subprocess.Popen(["sleep", "60"])
def ask(what):
    if what == "fail":
        raise ValueError("no")
    if what == "die":
        print("last words", file=sys.stderr)
        os._exit(3)
    if what == "hang":
        time.sleep(60)
    return {"child": child.pid, "name": given["name"]}
serve(given, {"ask": ask})
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peer_process.Peer:
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setattr(peer_process, "SCRIPTS", tmp_path)
    found = peer_process.Peer(
        "other",
        sys.executable,
        "peer.py",
        {"name": "x"},
        tmp_path / "log",
        {"PYTHONPATH": str(PEERS)},
    )
    found.wait_ready(30)
    return found


def state(pid: int) -> str:
    """R, S, T (stopped), Z or "" of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def wait_for(pid: int, states: tuple[str, ...]) -> None:
    deadline = time.monotonic() + 20
    while state(pid) not in states:
        assert time.monotonic() < deadline, state(pid)
        time.sleep(0.01)


def test_peer_runs_only_while_it_is_asked(peer: peer_process.Peer) -> None:
    with peer:
        answer = peer.ask("ask", 30, what="name")
        assert answer["name"] == "x"
        wait_for(answer["child"], ("T",))
        with pytest.raises(UserError, match="other: ask failed: ValueError: no"):
            peer.ask("ask", 30, what="fail")
        assert peer.ask("ask", 30, what="name") == answer
    # All that it started ends with it, though stopped.
    wait_for(answer["child"], ("", "Z"))


def test_peer_that_dies_or_hangs_is_an_error_with_its_last_words(peer: peer_process.Peer) -> None:
    with peer, pytest.raises(UserError, match=r"no answer within 0 s: noise of a library"):
        peer.ask("ask", 0.3, what="hang")
    assert state(peer._process.pid) == ""
    peer.close()


def test_peer_that_ends_says_why(peer: peer_process.Peer) -> None:
    with peer, pytest.raises(UserError, match=r"other ended: .*last words"):
        peer.ask("ask", 30, what="die")


def test_missing_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vllm: /nowhere/python does not start"):
        peer_process.Peer("vllm", "/nowhere/python", "vllm_peer.py", {}, tmp_path / "log")


# -- llama.cpp's file -----------------------------------------------------------------------------


def test_gguf_holds_the_checkpoint(tmp_path: Path) -> None:
    shape = ModelConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=128,
        tie_embeddings=True,
    )
    model = Decoder(shape)
    model.init_weights(0)
    save_checkpoint(model, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.vocab_size"] == 96
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 + 9 * shape.num_layers
    weights = model.hf_tensors()
    found = tensors["blk.1.attn_q.weight"]
    values = gguf.dequantize(found.data, found.tensor_type)
    expected = weights["model.layers.1.self_attn.q_proj.weight"].detach().bfloat16().float()
    np.testing.assert_array_equal(_to_halves(values, 4), expected.numpy())


def test_pairs_undo_halves() -> None:
    rows = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    np.testing.assert_array_equal(_to_halves(to_pairs(rows, 2), 2), rows)
    assert to_pairs(rows, 2)[:2, 0].tolist() == [0.0, 12.0]


# -- long contexts --------------------------------------------------------------------------------


def test_growth_is_the_exponent() -> None:
    assert latent_decode.growth([1, 8, 32], [3.0, 24.0, 96.0]) == pytest.approx(1.0)
    assert latent_decode.growth([1, 8, 32], [5.0, 5.0, 5.0]) == pytest.approx(0.0)


@pytest.mark.parametrize("indexer", [None, {"topk": 16}])
def test_held_noise_stands_in_for_a_context(indexer: dict[str, int] | None) -> None:
    model = Decoder(preset("glm5-tiny", 256, num_layers=2, mtp=None, indexer=indexer))
    model.init_weights(0)
    core = EngineCore(model, EngineConfig(max_running=1, max_context=128))
    seconds = latent_decode.step_seconds(core, 100, 6)
    assert len(seconds) == 6
    assert core.stats().tokens_prefilled == 1
    with pytest.raises(EngineError, match="100 tokens do not fit the"):
        core.hold_noise([5] * 100)
    core.forget_prefixes()
    assert core.stats().blocks_free == core.config.blocks


def test_configs_differ_in_the_indexer_only() -> None:
    sparse, dense = (latent_decode.config_of(sparse=sparse) for sparse in (True, False))
    assert sparse.indexer is not None
    assert dense.indexer is None
    assert sparse.max_positions > max(latent_decode.CONTEXTS.values())
