"""Which rows of flat token tensors belong to which sequence, and what each query may see.

Attention ops have no batch dimension: queries are S rows, keys are T rows, and a `Layout` says
where each sequence lies. One format covers padded batches, packed documents, chunked prefill and
keys held in a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Sequences side by side. All numbers live on the host.

    The queries of a sequence are its last tokens, and attention inside it is causal. A query row
    that belongs to no sequence (padding) sees nothing. Key ranges may lie anywhere, also overlap.

    Attributes:
        query_start: first query row of each sequence; ascending, ranges do not overlap.
        query_length: number of its query rows, >= 0.
        key_start: first key row of each sequence.
        key_length: number of its key rows, >= its query_length.

    Raises:
        ValueError: lengths that do not fit each other.
    """

    query_start: tuple[int, ...]
    query_length: tuple[int, ...]
    key_start: tuple[int, ...]
    key_length: tuple[int, ...]
    _bounds: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        sizes = {len(getattr(self, name)) for name in _FIELDS}
        if len(sizes) != 1:
            raise ValueError(f"layout: fields have different lengths {sorted(sizes)}")
        end = 0
        for start, length, keys in zip(
            self.query_start, self.query_length, self.key_length, strict=True
        ):
            if start < end or length < 0 or keys < length:
                raise ValueError(
                    f"layout: queries {start}..{start + length} with {keys} keys; ranges must "
                    "ascend without overlap and have at least as many keys as queries"
                )
            end = start + length
        if any(start < 0 for start in self.key_start):
            raise ValueError("layout: negative key_start")

    @classmethod
    def causal(cls, batch: int, tokens: int) -> "Layout":
        """A [batch, tokens] batch without padding, flattened."""
        starts = tuple(range(0, batch * tokens, tokens)) if tokens else (0,) * batch
        lengths = (tokens,) * batch
        return cls(starts, lengths, starts, lengths)

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> "Layout":
        """Documents one after the other in one row."""
        starts, end = [], 0
        for length in lengths:
            starts.append(end)
            end += length
        return cls(tuple(starts), tuple(lengths), tuple(starts), tuple(lengths))

    @property
    def num_sequences(self) -> int:
        """Number of sequences, empty ones included."""
        return len(self.query_start)

    @property
    def longest(self) -> int:
        """Keys of the longest sequence; 0 when there is none."""
        return max(self.key_length, default=0)

    def positions(self, rows: int, device: torch.device | str | None = None) -> Tensor:
        """Position of each query row inside its sequence, int64 [rows]; 0 for padding rows."""
        lower, upper = self.bounds(rows, device)
        return (upper - lower - 1).clamp(min=0).long()

    def bounds(self, rows: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """(lower, upper), each int32 [rows]: query s sees the keys lower[s] <= j < upper[s].

        Computed once per size and device. Padding rows have lower == upper == 0.

        Raises:
            ValueError: a sequence has query rows at or beyond `rows`.
        """
        key = (rows, str(device))
        if key not in self._bounds:
            end = max(
                (s + n for s, n in zip(self.query_start, self.query_length, strict=True) if n),
                default=0,
            )
            if end > rows:
                raise ValueError(f"layout: {end} query rows, but the tensor has {rows}")
            lower = torch.zeros(rows, dtype=torch.int32)
            upper = torch.zeros(rows, dtype=torch.int32)
            for start, length, first, keys in zip(
                self.query_start, self.query_length, self.key_start, self.key_length, strict=True
            ):
                lower[start : start + length] = first
                upper[start : start + length] = torch.arange(
                    first + keys - length + 1, first + keys + 1, dtype=torch.int32
                )
            self._bounds[key] = (lower.to(device), upper.to(device))
        return self._bounds[key]


_FIELDS = ("query_start", "query_length", "key_start", "key_length")
