"""The trainer's process: requests in, metrics and checkpoints out.

The parent drives every step, so budgets, progress and the ledger stay in one place. Busy seconds
are counted here, where they are spent.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.cluster.worker import WorkerConnection
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.training.batch import Sample
from headrace.training.trainer import NonFiniteLossError, OptimizerConfig, RlConfig, Trainer

_WORK = ("supervised", "rl", "save")
"""Methods whose time counts as training; loading a model or receiving data does not."""


class TrainerWorker:
    """Serves one stage. Methods are the `_do_*` functions below."""

    def __init__(self, connection: WorkerConnection, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.connection = connection
        self.trainer: Trainer | None = None
        self.rl = RlConfig(0.2, 0.28)
        self.data: list[Sample] = []
        self.order: list[int] = []
        self.rng = np.random.default_rng(0)
        self.busy_s = 0.0
        self.fresh = True

    def run(self) -> None:
        """Serve until the parent hangs up."""
        while True:
            request = self.connection.poll(1.0)
            if request is None:
                if self.connection.closed:
                    return
                continue
            handler = getattr(self, f"_do_{request.method}", None)
            if handler is None:
                self.connection.fail(request.id, "unknown_method", request.method)
                continue
            started = time.perf_counter()
            try:
                result = handler(**request.payload)
            except UserError as error:
                self.connection.fail(request.id, "user_error", str(error))
                continue
            except NonFiniteLossError as error:
                self.connection.fail(request.id, "non_finite", str(error))
                continue
            except OSError as error:
                self.connection.fail(request.id, "io_error", str(error))
                continue
            if request.method in _WORK:
                self.busy_s += time.perf_counter() - started
            self.connection.reply(request.id, result)

    @property
    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("no model is loaded")
        return self.trainer

    def _do_create(self, config: dict[str, Any], seed: int, path: str, tokenizer: str) -> int:
        """Write a checkpoint with random weights; returns its parameter count."""
        model = Decoder(ModelConfig(**config))
        model.init_weights(seed)
        save_checkpoint(model, Path(path), tokenizer_from=Path(tokenizer))
        return model.num_parameters()

    def _do_load(
        self, path: str, optimizer: dict[str, Any], rl: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint to train, with optimizer state when it has some."""
        model = load_checkpoint(Path(path))
        self.trainer = Trainer(model, OptimizerConfig(**optimizer))
        restored = self.trainer.restore_optimizer(Path(path))
        if rl is not None:
            self.rl = RlConfig(**rl)
        self.fresh = True
        return {"parameters": model.num_parameters(), "optimizer_restored": restored}

    def _do_data(self, samples: list[Any], seed: int) -> int:
        """Add supervised data; returns how much there is."""
        self.data += [msgspec.convert(s, Sample) for s in samples]
        self.rng = np.random.default_rng(seed)
        return len(self.data)

    def _next_batch(self, batch_tokens: int) -> list[Sample]:
        """The next samples of a shuffled epoch, about `batch_tokens` tokens."""
        batch: list[Sample] = []
        tokens = 0
        while tokens < batch_tokens:
            if not self.order:
                self.order = self.rng.permutation(len(self.data)).tolist()
            batch.append(self.data[self.order.pop()])
            tokens += len(batch[-1])
        return batch

    def _do_supervised(self, batch_tokens: int, learning_rates: list[float]) -> dict[str, float]:
        """One step per learning rate; returns the mean metrics and tokens per second."""
        started = time.perf_counter()
        rows = [
            self._trainer.supervised_step(self._next_batch(batch_tokens), rate)
            for rate in learning_rates
        ]
        seconds = time.perf_counter() - started
        tokens = sum(row["tokens"] for row in rows)
        return {
            "loss": sum(row["loss"] for row in rows) / len(rows),
            "grad_norm": sum(row["grad_norm"] for row in rows) / len(rows),
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "learning_rate": learning_rates[-1],
            "step": float(self._trainer.steps),
        }

    def _do_rl(self, samples: list[Any], version: int, learning_rate: float) -> dict[str, float]:
        """One update on a batch of rollouts."""
        started = time.perf_counter()
        batch = [msgspec.convert(s, Sample) for s in samples]
        metrics = self._trainer.rl_step(
            batch, self.rl, version=version, fresh=self.fresh, learning_rate=learning_rate
        )
        self.fresh = False
        metrics["update_s"] = time.perf_counter() - started
        return metrics

    def _do_save(
        self, path: str, tokenizer: str | None, optimizer: bool, reset_optimizer: bool
    ) -> float:
        """Write the current weights; afterwards they count as published. Returns seconds."""
        started = time.perf_counter()
        self._trainer.save(
            Path(path),
            tokenizer_from=Path(tokenizer) if tokenizer else None,
            optimizer=optimizer and not reset_optimizer,
        )
        if reset_optimizer:
            self._trainer.reset_optimizer()
        self.fresh = True
        return time.perf_counter() - started

    def _do_stats(self) -> dict[str, float]:
        """Busy seconds since the start."""
        return {"busy_s": self.busy_s}
