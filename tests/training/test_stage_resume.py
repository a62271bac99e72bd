"""Every supervised stage goes on bit for bit from its checkpoint.

The worker's methods are called as its connection would call them; only the process border is left
out (whole runs with killed processes are in tests/test_run.py).
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.data.corpora import CorpusSpec
from headrace.data.sources import SourceSpec
from headrace.data.stream import StreamSpec
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.decoder import Decoder
from headrace.model.presets import preset
from headrace.tokens.training import train_tokenizer
from headrace.training.batch import supervised_sample
from headrace.training.supervised import Budget, Phase, Position, send_data, train
from headrace.training.worker import TrainerWorker

TEXT = [
    "\n".join(f"def f{i}_{j}(x):\n    return x + {i * j}  # line {j} of file {i}" for j in range(8))
    for i in range(24)
]
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 64,
    "latent": {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 16},
    "moe": {"num_experts": 4, "intermediate_size": 16},
}


class Interrupted(Exception):
    """Stands in for a crash."""


class Direct:
    """Requests straight to a worker's methods."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.worker = TrainerWorker(None)  # type: ignore[arg-type]  # no request comes through it
        self.fail_at = fail_at
        self.done = 0

    async def request(
        self, method: str, payload: dict[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> Any:
        if method == "supervised":
            assert payload is not None
            self.done += len(payload["learning_rates"])
            if self.fail_at is not None and self.done > self.fail_at:
                raise Interrupted
        return getattr(self.worker, f"_do_{method}")(**(payload or {}))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory of a dense latent model with experts and prediction layers."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(TEXT, 300, "glm-5")
    tokenizer.save(folder / "tokenizer")
    for i, text in enumerate(TEXT):
        (folder / f"file{i}.py").write_text(text)
    config = preset("glm5-tiny", tokenizer.vocab_size, indexer=None, **TINY)
    model = Decoder(config)
    model.init_weights(0)
    save_checkpoint(model, folder / "start", tokenizer_from=folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.data.sources.default_cache", lambda: tmp_path / "cache")


def text_stream(base: Path, row_tokens: int, seed: int = 0) -> dict[str, Any]:
    spec = StreamSpec((SourceSpec(CorpusSpec(str(base), globs=("*.py",), held_out=0.1)),))
    return {
        "kind": "text",
        "spec": msgspec.to_builtins(spec),
        "row_tokens": row_tokens,
        "batch_rows": 4,
        "seed": seed,
    }


INDEXER = {"num_heads": 2, "head_dim": 16, "topk": 16, "share_every": 2}
STAGES: dict[str, dict[str, Any]] = {
    "pretrain": {
        "losses": {"mtp_weight": 0.3, "balance_weight": 1e-4},
        "optimizer": {"algorithm": "muon_split", "router_bias_rate": 1e-3},
    },
    "midtrain": {"losses": {"mtp_weight": 0.1}, "optimizer": {"bfloat16": True}},
    "dsa_warmup": {
        "losses": {"language": False, "index": "dense"},
        "trainable": "indexer",
        "indexer": INDEXER,
    },
    "dsa_adapt": {"losses": {"index": "sparse", "mtp_weight": 0.1}, "indexer": INDEXER},
    "sft": {"losses": {"mtp_weight": 0.1}, "trainable": "all_but_indexer", "indexer": INDEXER},
}


def run(base: Path, kind: str, root: Path, fail_at: int | None = None) -> dict[str, torch.Tensor]:
    """The stage from its beginning or from `root`; returns the weights it ends with."""
    stage = STAGES[kind]
    direct = Direct(fail_at)
    phases = [Phase(1.0, {"stream": text_stream(base, 48)})]
    if kind == "midtrain":
        phases = [
            Phase(0.4, {"stream": text_stream(base, 64)}),
            Phase(
                1.0,
                {"stream": text_stream(base, 96, 1), "positions": 96, "rope_theta": 4e4},
            ),
        ]
    if kind == "sft":
        phases = [Phase(1.0, {"stream": {"kind": "samples", "batch_tokens": 90, "seed": 3}})]

    async def report(position: Position, done: float, metrics: dict[str, float]) -> None:
        assert metrics["loss"] == pytest.approx(metrics["loss"])  # finite

    async def drive() -> None:
        load = {
            **stage,
            "path": str(base / "start"),
            "optimizer": {"learning_rate": 1e-3, **stage.get("optimizer", {})},
            "guard": {"bad_steps": 3},
        }
        await direct.request("load", load)
        if kind == "sft":
            samples = [supervised_sample(range(i, i + 20), [1.0] * 20) for i in range(30)]
            await send_data(direct, samples)
        await train(
            Budget(8, None, 1e-3, 2, 0.1),
            worker=direct,
            phases=phases,
            checkpoint=str(root),
            checkpoint_every=3,
            keep=1,
            report=report,
        )

    asyncio.run(drive())
    model = direct.worker.trainer
    assert model is not None
    return {name: value.clone() for name, value in model.model.state_dict().items()}


@pytest.mark.parametrize("kind", STAGES)
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(base, tmp_path, kind):
    whole = run(base, kind, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(base, kind, tmp_path / "broken", fail_at=7)
    resumed = run(base, kind, tmp_path / "broken")
    assert whole.keys() == resumed.keys()
    different = [name for name in whole if not torch.equal(whole[name], resumed[name])]
    assert different == []
    start = load_checkpoint(base / "start").state_dict()
    moved = [name for name, value in start.items() if not torch.equal(value, whole[name])]
    # Warm-up leaves the base alone; every other stage moves it, and leaves a frozen indexer alone.
    assert bool(moved) == (kind != "dsa_warmup")


def test_a_checkpoint_of_other_data_is_refused(base, tmp_path):
    with pytest.raises(Interrupted):
        run(base, "pretrain", tmp_path / "broken", fail_at=7)
    direct = Direct()
    load = {
        **STAGES["pretrain"],
        "path": str(base / "start"),
        "optimizer": {"learning_rate": 1e-3, "algorithm": "muon_split"},
    }
    direct.worker._do_load(**load)
    direct.worker._do_phase(stream=text_stream(base, 48, seed=99))
    with pytest.raises(UserError, match="saved with other data"):
        direct.worker._do_restore(str(tmp_path / "broken"))


def test_sequences_beyond_the_models_positions_are_refused(base):
    direct = Direct()
    direct.worker._do_load(path=str(base / "start"), optimizer={"learning_rate": 1e-3})
    with pytest.raises(UserError, match="midtrain"):
        direct.worker._do_phase(stream=text_stream(base, 65))
