"""Checkpoints written beside training: the weights are copied at once, the file takes its time.

A snapshot is what the trainer held at one moment, in memory that the next one uses again; a thread
writes it. Reading, resuming and what a checkpoint is for are not known here.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.model.checkpoint import (
    checkpoint_config,
    checkpoint_directory,
    copy_tokenizer,
    write_weights,
)
from headrace.training.trainer import OPTIMIZER_FILE, Trainer


class SnapshotWriter:
    """Writes one checkpoint at a time. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._held: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None

    def __enter__(self) -> "SnapshotWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    @property
    def writing(self) -> Future[None]:
        """The newest checkpoint on its way to the disk.

        Raises:
            RuntimeError: none was begun.
        """
        if self._writing is None:
            raise RuntimeError("no checkpoint was begun")
        return self._writing

    @torch.no_grad()
    def begin(
        self, trainer: Trainer, path: Path, *, tokenizer_from: Path | None, optimizer: bool
    ) -> None:
        """Copy what the trainer holds now, and begin to write it as `Trainer.save` would.

        Waits for the checkpoint before, if that is still being written. Memory: another copy of
        the weights, and of the optimizer's state if that is written, for good.

        Args:
            trainer: of a single rank.
            path: directory to create or replace as a whole.
            tokenizer_from: directory whose tokenizer files go along.
            optimizer: also write the optimizer's state.
        """
        if self._writing is not None:
            self._writing.exception()  # waits; whoever asked for it was told
        weights = self._copies("weights", trainer.model.hf_tensors())
        state: dict[str, Any] | None = None
        if optimizer:
            held = self._copies("optimizer", trainer.optimizers.named_state())
            state = {"optimizer": held, "steps": trainer.steps}
        config = checkpoint_config(trainer.model)
        self._writing = self._thread.submit(_write, path, weights, config, tokenizer_from, state)

    def _copies(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in the CPU's memory, in the places of the last ones where they fit."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            place = self._held.get(f"{kind}.{name}")
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                place = torch.empty_like(
                    tensor, device="cpu", memory_format=torch.contiguous_format
                )
                self._held[f"{kind}.{name}"] = place
            copies[name] = place.copy_(tensor)
        return copies


def _write(
    path: Path,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    tokenizer_from: Path | None,
    state: Mapping[str, Any] | None,
) -> None:
    with checkpoint_directory(path) as draft:
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, draft)
        write_weights(weights, config, draft)
        if state is not None:
            torch.save(state, draft / OPTIMIZER_FILE)
