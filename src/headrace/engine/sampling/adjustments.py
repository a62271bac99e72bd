"""What changes single logits of a batch before the temperature: bias, penalties, held stop ids,
and what a grammar does not allow.

All rows' changes lie in flat arrays with one entry per (row, id), so that a step gathers, changes
and scatters a few numbers and never needs a second [n, V]. Grammars alone, which rule out most ids,
come as rows. `SamplingParams` states the formulas.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine.types import SamplingParams


class LogitBias(NamedTuple):
    """logit_bias of all rows as flat [m] triples."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> "LogitBias | None":
        triples = [(i, k, b) for i, p in enumerate(params) for k, b in p.logit_bias.items()]
        if not triples:
            return None
        rows, ids, values = zip(*triples, strict=True)
        return LogitBias(
            torch.tensor(rows), torch.tensor(ids), torch.tensor(values, dtype=torch.float32)
        )

    def apply(self, scores: Tensor) -> None:
        scores[self.rows, self.ids] += self.values


class HeldStops(NamedTuple):
    """Stop ids of rows with min_tokens as flat [m] arrays; impossible while drawn < until."""

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    until: npt.NDArray[np.uint64]

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> "HeldStops | None":
        triples = [
            (i, stop, p.min_tokens)
            for i, p in enumerate(params)
            if p.min_tokens > 0
            for stop in set(p.stop_ids)
        ]
        if not triples:
            return None
        rows, ids, until = zip(*triples, strict=True)
        return HeldStops(
            np.array(rows, np.int64), np.array(ids, np.int64), np.array(until, np.uint64)
        )

    def apply(self, scores: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        held = (drawn[self.rows] < self.until) & (self.ids < scores.shape[-1])
        if held.any():
            scores[torch.from_numpy(self.rows[held]), torch.from_numpy(self.ids[held])] = -torch.inf


class Allowed(NamedTuple):
    """What m rows with a grammar may draw in one step.

    Attributes:
        rows: [m] int64.
        mask: [m, V] bool.
    """

    rows: Tensor
    mask: Tensor

    @staticmethod
    def of(masks: Sequence[npt.NDArray[np.bool_] | None]) -> "Allowed | None":
        """Of one mask [V] for each row of a batch, None where anything is allowed."""
        rows = [i for i, mask in enumerate(masks) if mask is not None]
        if not rows:
            return None
        stacked = np.stack([mask for mask in masks if mask is not None])
        return Allowed(torch.tensor(rows), torch.from_numpy(stacked))

    def apply(self, scores: Tensor) -> None:
        scores[self.rows] = scores[self.rows].masked_fill(~self.mask, -torch.inf)


class Penalties:
    """What rows with penalties have seen, as flat arrays with one entry per (row, id).

    An entry's count is how often the row sampled the id; 0 for an id of the prompt alone. Entries
    are appended as new ids are sampled, in arrays that double when they are full.
    """

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        drawn: Sequence[int],
        prompts: Sequence[Sequence[int]] | None,
        outputs: Sequence[Sequence[int]] | None,
    ) -> "Penalties | None":
        seen: list[dict[int, int] | None] = []
        for i, p in enumerate(params):
            if p.repetition_penalty == 1 and not p.presence_penalty and not p.frequency_penalty:
                seen.append(None)
                continue
            counts: dict[int, int] = {}
            if p.repetition_penalty != 1:
                if prompts is None:
                    raise ValueError(f"row {i} has a repetition penalty but no prompt ids")
                counts = dict.fromkeys(np.asarray(prompts[i], dtype=np.int64).tolist(), 0)
            output = [] if outputs is None else np.asarray(outputs[i], dtype=np.int64).tolist()
            if len(output) != drawn[i]:
                raise ValueError(
                    f"row {i} has penalties and drew {drawn[i]} tokens, but {len(output)} output "
                    "ids were given"
                )
            for token in output:
                counts[token] = counts.get(token, 0) + 1
            seen.append(counts)
        return None if all(counts is None for counts in seen) else cls(params, seen)

    def __init__(
        self, params: Sequence[SamplingParams], seen: Sequence[dict[int, int] | None]
    ) -> None:
        self._repetition = torch.tensor([float(p.repetition_penalty) for p in params])
        self._presence = torch.tensor([float(p.presence_penalty) for p in params])
        self._frequency = torch.tensor([float(p.frequency_penalty) for p in params])
        self._used = sum(len(counts) for counts in seen if counts is not None)
        room = 2 * self._used + 64
        self._rows = np.empty(room, dtype=np.int64)
        self._ids = np.empty(room, dtype=np.int64)
        self._counts = np.empty(room, dtype=np.float32)
        # Where each id of a row has its entry.
        self._entries: list[tuple[int, dict[int, int]]] = []
        start = 0
        for row, counts in enumerate(seen):
            if counts is None:
                continue
            end = start + len(counts)
            self._rows[start:end] = row
            self._ids[start:end] = list(counts)
            self._counts[start:end] = list(counts.values())
            self._entries.append((row, {token: start + i for i, token in enumerate(counts)}))
            start = end

    def count(self, ids: Sequence[int]) -> None:
        """Each row sampled one more id."""
        for row, entries in self._entries:
            token = int(ids[row])
            entry = entries.get(token)
            if entry is not None:
                self._counts[entry] += 1
                continue
            if self._used == len(self._ids):
                self._rows = np.resize(self._rows, 2 * self._used)
                self._ids = np.resize(self._ids, 2 * self._used)
                self._counts = np.resize(self._counts, 2 * self._used)
            entries[token] = self._used
            self._rows[self._used], self._ids[self._used] = row, token
            self._counts[self._used] = 1
            self._used += 1

    def apply(self, scores: Tensor) -> None:
        rows = torch.from_numpy(self._rows[: self._used])
        ids = torch.from_numpy(self._ids[: self._used])
        counts = torch.from_numpy(self._counts[: self._used])
        repetition = self._repetition[rows]
        z = scores[rows, ids]
        z = torch.where(z < 0, z * repetition, z / repetition)
        frequent = counts * self._frequency[rows]
        present = (counts > 0) * self._presence[rows]
        scores[rows, ids] = z - frequent - present
