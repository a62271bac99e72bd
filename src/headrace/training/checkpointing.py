"""Resumable checkpoints: everything a stage needs to go on as if it had never stopped.

Weights, router biases, optimizer state and random state are written by all ranks together
(torch.distributed.checkpoint), so that another number of ranks can read them; small things, the
data stream's position among them, are JSON beside. A checkpoint appears whole or not at all.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headrace.errors import UserError
from headrace.model.directory_swap import replaced_directory
from headrace.training.guards import GuardState
from headrace.training.parallel import Ranks
from headrace.training.trainer import Trainer

_PREFIX = "step-"
_STATE_FILE = "state.json"


def save_state(trainer: Trainer, root: Path, extra: Mapping[str, Any], *, keep: int) -> Path:
    """Write `root`/step-N for the trainer's step count N; all ranks must call.

    Everything is on the disk (fsync) before the directory gets its name.

    Args:
        trainer: what to save.
        root: folder of the stage's checkpoints; made if missing.
        extra: JSON-able, of rank 0: stream state, position and the like.
        keep: how many checkpoints stay, this one included; >= 1.

    Returns:
        The checkpoint's path.

    Raises:
        OSError: it cannot be written; older checkpoints are untouched.
    """
    if keep < 1:
        raise ValueError(f"save_state: keep {keep} must be at least 1")
    target = root / f"{_PREFIX}{trainer.steps:08d}"
    with _draft(target, trainer.ranks) as draft:
        with _alone_quietly(trainer.ranks):
            save(
                _tensors(trainer),
                storage_writer=FileSystemWriter(draft, sync_files=True),
                no_dist=trainer.ranks.size == 1,
            )
        if trainer.ranks.rank == 0:
            state = {
                "steps": trainer.steps,
                "guard": msgspec.to_builtins(trainer.guard_state),
                "extra": dict(extra),
            }
            _write(draft / _STATE_FILE, json.dumps(state))
            _sync_folder(draft)
    if trainer.ranks.rank == 0:
        _sync_folder(root)
        for old in _checkpoints(root)[:-keep]:
            shutil.rmtree(old)
    trainer.ranks.barrier()
    return target


def load_state(trainer: Trainer, root: Path) -> dict[str, Any]:
    """Put the newest checkpoint under `root` into a trainer; all ranks must call.

    The trainer must have been built with the same model, optimizer and trainable set. The number of
    ranks may differ; with the same number, training goes on bit for bit.

    Returns:
        The `extra` it was saved with.

    Raises:
        UserError: there is no checkpoint, or it belongs to another model or optimizer.
    """
    path = latest(root)
    if path is None:
        raise UserError(f"{root}: no checkpoint to go on from; start the stage afresh")
    state = _read(path)
    tensors = _tensors(trainer)
    _check(path, tensors)
    with _alone_quietly(trainer.ranks):
        load(tensors, storage_reader=FileSystemReader(path), no_dist=trainer.ranks.size == 1)
    torch.set_rng_state(tensors["rng"])
    trainer.steps = int(state["steps"])
    trainer.guard_state = msgspec.convert(state["guard"], GuardState)
    return state["extra"]


def latest(root: Path) -> Path | None:
    """The newest checkpoint under `root`, None when there is none."""
    found = _checkpoints(root)
    return found[-1] if found else None


def read_extra(root: Path) -> dict[str, Any] | None:
    """The `extra` of the newest checkpoint under `root`, without loading it; None: there is none.

    Raises:
        UserError: the checkpoint's state file is unreadable.
    """
    path = latest(root)
    return None if path is None else _read(path)["extra"]


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that is saved as a tensor, flat; loading fills these very tensors."""
    return {
        # A tied output projection appears once: the decoder has no second parameter for it.
        **{f"model.{name}": t.detach() for name, t in trainer.model.state_dict().items()},
        **{f"optimizer.{name}": t for name, t in trainer.optimizers.named_state().items()},
        "rng": torch.get_rng_state(),
    }


def _check(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose table of contents is not the trainer's."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {name: getattr(entry, "size", None) for name, entry in metadata.items()}
    for problem, names in (
        ("lacks", tensors.keys() - sizes.keys()),
        ("has the unexpected", sizes.keys() - tensors.keys()),
        ("has another shape of", {n for n in tensors if sizes.get(n) != tensors[n].shape}),
    ):
        if names:
            raise UserError(
                f"checkpoint {path} {problem} {min(names)} ({len(names)} such); it was saved by "
                "another model, optimizer or set of trained parameters; start the stage afresh"
            )


@contextmanager
def _alone_quietly(ranks: Ranks) -> Iterator[None]:
    """torch warns that a single process is alone; that is known."""
    with warnings.catch_warnings():
        if ranks.size == 1:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _draft(target: Path, ranks: Ranks) -> Iterator[Path]:
    """A directory all ranks write to, which becomes `target` when all of them are done."""
    if ranks.rank == 0:
        with replaced_directory(target) as draft:
            ranks.broadcast(str(draft))
            yield draft
            ranks.barrier()
    else:
        yield Path(ranks.broadcast(None))
        ranks.barrier()


def _checkpoints(root: Path) -> list[Path]:
    """All checkpoints, oldest first. Unfinished ones have other names."""
    return sorted(p for p in root.glob(f"{_PREFIX}*") if p.is_dir())


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"checkpoint {path}: {_STATE_FILE} is unreadable ({error}); remove the directory"
        ) from error


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
