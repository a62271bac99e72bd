"""Memory in large pages, for what is read from end to end in every decoding step.

A processor that looks up the place of every 4 KiB page streams weights at half the speed of its
memory, worst inside a virtual machine. The operating system is asked for pages of 2 MiB, which it
may refuse; nothing changes then but speed.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 << 20
"""Bytes mapped at a time; what is never written takes no memory."""
_LINE = 64


class LargePages:
    """Hands out zeroed CPU tensors that lie one behind the other. Their memory is given back when
    none of those that share a mapping is left."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `torch.zeros`, contiguous and aligned to cache lines."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.zeros(*shape, dtype=dtype)
        if size > len(self._chunk):
            self._chunk = _map(max(_CHUNK, size))
        taken, self._chunk = self._chunk[:size], self._chunk[-(-size // _LINE) * _LINE :]
        return taken.view(dtype).view(*shape)


def _map(size: int) -> Tensor:
    """[size or more] zeroed bytes from the start of a page on."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    size = -(-size // _PAGE) * _PAGE
    # Private: pages of shared mappings have a setting of their own, which is mostly off.
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without large pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % _PAGE
    return raw[start : start + size]
