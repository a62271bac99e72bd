"""The trainer's process: requests in, metrics and checkpoints out.

The parent drives every step, so budgets, progress and the ledger stay in one place. Busy seconds
are counted here, where they are spent. Several such processes may be the ranks of one trainer:
then each gets every request.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from headrace import ops
from headrace.cluster.worker import WorkerConnection, serve
from headrace.data.stream import StreamSpec, TokenStream
from headrace.errors import UserError
from headrace.model.adapt import extend_with_indexer
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import IndexerConfig, ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.presets import preset
from headrace.tokens.tokenizer import load_tokenizer
from headrace.training.allocator import keep_freed_memory
from headrace.training.batch import Sample
from headrace.training.checkpointing import load_state, read_extra, save_state
from headrace.training.forward import LossConfig
from headrace.training.guards import GuardConfig
from headrace.training.meters import StepMeter
from headrace.training.parallel import Ranks, joined
from headrace.training.snapshots import SnapshotWriter
from headrace.training.streams import BatchStream, SampleStream, TextStream
from headrace.training.trainer import NonFiniteLossError, OptimizerConfig, RlConfig, Trainer

Trainable = Literal["all", "indexer", "all_but_indexer"]

_WORK = ("supervised", "rl", "save", "publish", "checkpoint")
"""Methods whose time counts as training; loading a model or receiving data does not."""
_FAILURES: dict[type[Exception], str] = {
    UserError: "user_error",
    NonFiniteLossError: "non_finite",
    OSError: "io_error",
}
"""What the parent is told of; anything else ends the process."""


class TrainerWorker:
    """Serves one stage. Methods are the `_do_*` functions below."""

    def __init__(self, connection: WorkerConnection, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.connection = connection
        self.trainer: Trainer | None = None
        self.rl = RlConfig()
        self.data: list[Sample] = []
        self.stream: BatchStream | None = None
        self.meter: StepMeter | None = None
        self.trainable: Trainable = "all"
        self.checkpoint = Path()
        self.ranks = Ranks()
        self.busy_s = 0.0
        self.fresh = True
        # Of the weights while they are fresh; None: of those that `load` brought.
        self.version: int | None = None
        self._resources = ExitStack()
        self.snapshots = self._resources.enter_context(SnapshotWriter())

    def run(self) -> None:
        """Serve until the parent hangs up."""
        keep_freed_memory()
        with self._resources:
            serve(self.connection, self, _FAILURES, self._count)

    def _count(self, method: str, seconds: float) -> None:
        if method in _WORK:
            self.busy_s += seconds

    @property
    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("no model is loaded")
        return self.trainer

    @property
    def _stream(self) -> BatchStream:
        if self.stream is None:
            raise RuntimeError("no phase has begun")
        return self.stream

    # -- models -----------------------------------------------------------------------------

    def _do_join(self, rank: int, world: int, address: str, port: int) -> None:
        """Become one of several ranks, for the rest of this process's life."""
        group = joined(rank, world, f"tcp://{address}:{port}")
        self.ranks = self._resources.enter_context(group)

    def _do_create(
        self, shape: dict[str, Any], vocab_size: int, seed: int, path: str, tokenizer: str
    ) -> int:
        """Write a checkpoint with random weights; returns its parameter count."""
        if "preset" in shape:
            config = preset(shape["preset"], vocab_size, **shape["overrides"])
        else:
            config = ModelConfig(vocab_size=vocab_size, **shape["config"])
        model = Decoder(config)
        model.init_weights(seed)
        save_checkpoint(model, Path(path), tokenizer_from=Path(tokenizer))
        return model.num_parameters()

    def _do_load(
        self,
        path: str,
        optimizer: dict[str, Any],
        rl: dict[str, Any] | None = None,
        losses: dict[str, Any] | None = None,
        trainable: Trainable = "all",
        guard: dict[str, Any] | None = None,
        indexer: dict[str, Any] | None = None,
        seed: int = 0,
        reference: str | None = None,
        teachers: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Load a checkpoint to train, with optimizer state when it has some.

        Args:
            losses: keyword arguments of `LossConfig`; parts that the model lacks are left out.
            indexer: add one of this shape if the model has none.
            seed: of its weights.
            rl: keyword arguments of `RlConfig`.
            reference: checkpoint that RL keeps close to.
            teachers: checkpoints that distillation asks, numbered as samples name them.
        """
        self.checkpoint = Path(path)
        # Compiling the ops would otherwise count as a stage's time.
        ops.prepare(self.ranks.device.type)
        model = load_checkpoint(self.checkpoint)
        if indexer is not None and model.config.indexer is None:
            model = extend_with_indexer(model, _indexer(indexer, model.config.num_layers), seed)
        if trainable == "all_but_indexer" and model.config.indexer is None:
            trainable = "all"
        if rl is not None and model.config.indexer is None:
            # A stage says what happens to an indexer without knowing whether there is one.
            losses = {name: value for name, value in (losses or {}).items() if name != "index"}
        self.trainable = trainable
        self.trainer = Trainer(
            model,
            OptimizerConfig(**optimizer),
            losses=_losses(model.config, losses or {}),
            trainable=trainable,
            guard=None if guard is None else GuardConfig(**guard),
            ranks=self.ranks,
        )
        restored = self.trainer.restore_optimizer(self.checkpoint)
        if rl is not None:
            self.rl = RlConfig(**rl)
        self.trainer.keep_policies(
            reference=None if reference is None else load_checkpoint(Path(reference)),
            teachers=[load_checkpoint(Path(teacher)) for teacher in teachers],
        )
        self.fresh, self.version = True, None
        return {"parameters": model.num_parameters(), "optimizer_restored": restored}

    def _do_save(
        self,
        path: str,
        tokenizer: str | None,
        optimizer: bool,
        reset_optimizer: bool,
        beside: bool = False,
        version: int | None = None,
    ) -> float:
        """Write the current weights; afterwards they count as published. Returns seconds.

        Args:
            tokenizer: directory whose tokenizer files go along.
            optimizer: also write the optimizer's state.
            reset_optimizer: forget that state afterwards, and do not write it.
            beside: copy the weights and return; "written" says when they are on the disk.
            version: which version they will be published as.
        """
        started = time.perf_counter()
        source = Path(tokenizer) if tokenizer else None
        optimizer = optimizer and not reset_optimizer
        if beside and self.ranks.size == 1:
            self.snapshots.begin(
                self._trainer, Path(path), tokenizer_from=source, optimizer=optimizer
            )
        else:
            self._trainer.save(Path(path), tokenizer_from=source, optimizer=optimizer)
        if reset_optimizer:
            self._trainer.reset_optimizer()
        self.fresh, self.version = True, version
        return time.perf_counter() - started

    def _do_written(self) -> Future[None] | None:
        """Answered once the checkpoint that was last written beside training is on the disk."""
        return self.snapshots.writing if self.ranks.size == 1 else None

    def _do_publish(self, folder: str, version: int, dtype: str | None = None) -> str | None:
        """Put the current weights into shared memory, as engines of `dtype` hold them.

        Returns:
            The published version's path, on rank 0.
        """
        stored = None if dtype is None else getattr(torch, dtype)
        path = self._trainer.publish(Path(folder), version, dtype=stored)
        return None if path is None else str(path)

    # -- supervised stages ------------------------------------------------------------------

    def _do_data(self, samples: list[Any]) -> int:
        """Add supervised data; returns how much there is."""
        self.data += [msgspec.convert(s, Sample) for s in samples]
        return len(self.data)

    def _do_phase(
        self,
        stream: dict[str, Any],
        positions: int | None = None,
        rope_theta: float | None = None,
    ) -> None:
        """Begin a part of the stage.

        Args:
            stream: {"kind": "samples", "batch_tokens", "seed"} over the data sent before, or
                {"kind": "text", "spec", "row_tokens", "batch_rows", "seed"}.
            positions: the model's longest sequence from here on, when that is more.
            rope_theta: base of its rotary frequencies from here on; None keeps it.
        """
        model = self._trainer.model
        if positions is not None or rope_theta is not None:
            longest = max(positions or 0, model.config.max_positions)
            model.set_rope(theta=rope_theta, max_positions=longest)
        if stream["kind"] == "samples":
            self.stream = SampleStream(self.data, stream["batch_tokens"], stream["seed"])
        else:
            if stream["row_tokens"] > model.config.max_positions:
                raise UserError(
                    f"sequence = {stream['row_tokens']} exceeds the model's "
                    f"{model.config.max_positions} positions; lower it, or extend the context in "
                    "a midtrain stage"
                )
            self.stream = TextStream(
                TokenStream(
                    msgspec.convert(stream["spec"], StreamSpec),
                    load_tokenizer(self.checkpoint),
                    stream["row_tokens"],
                    stream["batch_rows"],
                    stream["seed"],
                )
            )
        self._trainer.reset_guard()
        self.meter = self._new_meter()

    def _new_meter(self) -> StepMeter:
        trainer = self._trainer
        mtp = trainer.model.config.mtp
        return StepMeter(
            trainer.model.config,
            mtp_steps=mtp.depth if mtp is not None and trainer.losses.mtp_weight > 0 else 0,
            trainable=self.trainable,
            bfloat16=trainer.config.bfloat16,
            ranks=self.ranks.size,
        )

    def _do_supervised(self, learning_rates: list[float]) -> dict[str, float]:
        """One step per learning rate; returns mean metrics, rates of work and memory."""
        meter = self.meter
        assert meter is not None  # the phase brought it
        started = time.perf_counter()
        rows = []
        for rate in learning_rates:
            batch = self._stream.next_batch()
            rows.append(self._trainer.supervised_step(batch, rate))
            meter.add(len(sample) for sample in batch)
        seconds = time.perf_counter() - started
        metrics = {name: sum(row[name] for row in rows) / len(rows) for name in rows[-1]}
        return {
            **metrics,
            "tokens": sum(row["tokens"] for row in rows),
            "skipped": sum(row["skipped"] for row in rows),
            "skipped_total": float(self._trainer.guard_state.skipped),
            **meter.read(seconds),
            "learning_rate": learning_rates[-1],
            "step": float(self._trainer.steps),
        }

    def _do_progress(self, checkpoint: str) -> dict[str, Any] | None:
        """Where the newest resumable checkpoint under the folder stands; None without one."""
        extra = read_extra(Path(checkpoint))
        return None if extra is None else extra["position"]

    def _do_checkpoint(self, checkpoint: str, position: dict[str, Any], keep: int) -> None:
        """Write everything needed to go on from here, bit for bit."""
        extra = {"position": position, "stream": self._stream.state()}
        save_state(self._trainer, Path(checkpoint), extra, keep=keep)

    def _do_restore(self, checkpoint: str) -> None:
        """Go to the newest checkpoint; its phase must have begun."""
        extra = load_state(self._trainer, Path(checkpoint))
        self._stream.restore(extra["stream"])

    # -- reinforcement learning -------------------------------------------------------------

    def _do_rl(self, samples: list[Any], version: int, learning_rate: float) -> dict[str, float]:
        """One update on a batch of rollouts; `busy_s` of the metrics is since the start."""
        started = time.perf_counter()
        batch = [msgspec.convert(s, Sample) for s in samples]
        # Engines may not have the newest weights yet: `version` is then that of others.
        fresh = self.fresh and self.version in (None, version)
        metrics = self._trainer.rl_step(
            batch, self.rl, version=version, fresh=fresh, learning_rate=learning_rate
        )
        self.fresh = False
        metrics["update_s"] = time.perf_counter() - started
        metrics["busy_s"] = self.busy_s + metrics["update_s"]
        return metrics


def _losses(config: ModelConfig, wanted: dict[str, Any]) -> LossConfig:
    """What a stage asks for, as far as the model has the parts."""
    losses = LossConfig(**wanted)
    if config.mtp is None:
        losses = losses._replace(mtp_weight=0.0)
    if config.moe is None:
        losses = losses._replace(balance_weight=0.0)
    return losses


def _indexer(shape: dict[str, Any], num_layers: int) -> IndexerConfig:
    """An indexer's config from a recipe's numbers."""
    every = shape["share_every"]
    return IndexerConfig(
        num_heads=shape["num_heads"],
        head_dim=shape["head_dim"],
        topk=shape["topk"],
        shared=tuple(layer % every != 0 for layer in range(num_layers)) if every > 1 else (),
    )
