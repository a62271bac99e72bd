"""The weights of a running engine: always one whole version.

Brings the model and every packed copy of it to other weights. An update that is refused has changed
nothing; one that fails halfway leaves weights of no version, and the engine must end. What becomes
of requests and of what is cached is the core's business.
"""

import time
from collections.abc import Sequence
from typing import Protocol, get_args

import torch

from headrace.engine.config import UpdatePolicy
from headrace.engine.types import EngineError
from headrace.model.checkpoint import load_weights_into
from headrace.model.decoder import Decoder
from headrace.model.shared_folder import is_published
from headrace.model.shared_weights import LoadReport, load_shared_into


class Packed(Protocol):
    """A copy of the model's weights in another layout."""

    def repack(self) -> None:
        """Take over the model's present weights."""
        ...


class EngineWeights:
    """A decoder's weights and what is derived from them.

    Args:
        model: overwritten in place by updates.
        copies: brought up to date after the model.

    Attributes:
        finite: whether the sum of every parameter is, since the last update.
    """

    def __init__(self, model: Decoder, copies: Sequence[Packed]) -> None:
        self._model = model
        self._copies = copies
        # Checksums of the published version that the model holds, by tensor; empty if it is none.
        self._held: dict[str, int] = {}
        self.finite = True

    @torch.no_grad()
    def load(self, path: str, version: int) -> LoadReport:
        """Switch to other weights of the same model.

        Args:
            path: a checkpoint directory, read as a whole; or what `shared_weights.publish`
                returned, of which only tensors are copied that differ from the last such update.
            version: their stamp; that of a published version is its own.

        Raises:
            UserError: the weights cannot be read or do not fit the model. Nothing has changed.
            HalfLoaded: a checkpoint failed when a part of it was already in the model.
        """
        if is_published(path):
            report = load_shared_into(self._model, path, self._held, version=version)
        else:
            report = self._load_checkpoint(path)
        if report.tensors_changed:
            self.finite = all(bool(p.sum().isfinite()) for p in self._model.parameters())
            for copy in self._copies:
                copy.repack()
        return report

    def _load_checkpoint(self, path: str) -> LoadReport:
        started = time.perf_counter()
        load_weights_into(self._model, path)
        self._held = {}
        tensors = self._model.hf_tensors().values()
        copied = sum(tensor.nbytes for tensor in tensors)
        return LoadReport(copied, len(tensors), time.perf_counter() - started)


def check_update(version: int, policy: str) -> None:
    """Refuse an update that makes no sense.

    Raises:
        EngineError: INVALID version or policy.
    """
    if version < 0:
        raise EngineError(EngineError.INVALID, f"version is {version}; it must be >= 0")
    if policy not in get_args(UpdatePolicy):
        raise EngineError(
            EngineError.INVALID,
            f"policy is {policy!r}; it must be one of {', '.join(get_args(UpdatePolicy))}",
        )
