"""The compiled step: one native call from the token ids of a pass to logits.

`CompiledStep.create` describes a grouped-query decoder and its cache to the native library and
compares a few tokens with the decoder itself. Where there is no library, the model is of another
kind, or a result differs, it returns None and the engine goes through the decoder, slower and
otherwise the same. It knows nothing of requests; `StepBuffers` alone looks at sequences.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headrace.engine.cache.grouped import GroupedCache
from headrace.engine.cache.paged import PagedBatch, PagedCache
from headrace.engine.packed_model import PackedLinear, PackedProducts
from headrace.engine.sequence import Chunk
from headrace.model.attention import GroupedQueryAttention
from headrace.model.block import Block
from headrace.model.decoder import Decoder
from headrace.model.feed_forward import SwiGLU
from headrace.ops import row_independent
from headrace.ops.native import build
from headrace.ops.packed import KINDS, PackedMatrix
from headrace.ops.pages import LargePages
from headrace.ops.registry import REGISTRY

_TOLERANCE = 1e-3
"""Largest accepted difference of log-probabilities to plain torch; a wrong step is off by units."""
_log = logging.getLogger(__name__)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Matrix(ctypes.Structure):
    """`StepMatrix` of the native library."""

    _fields_ = (
        *((name, _POINTER) for name in ("panels", "scales", "bias")),
        *((name, _SIZE) for name in ("kind", "inputs", "outputs")),
    )


class _Layer(ctypes.Structure):
    """`StepLayer` of the native library."""

    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "q_norm", "k_norm", "feed_forward_norm")),
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Step(ctypes.Structure):
    """`Step` of the native library."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "embedding", "final_norm", "cosine", "sine")),
        ("head", _Matrix),
        *((name, _POINTER) for name in ("ids", "positions", "owners", "starts", "counts", "asked")),
        *((name, _POINTER) for name in ("tables", "logits")),
        *(
            (name, _SIZE)
            for name in (
                "n",
                "sequences",
                "num_asked",
                "num_layers",
                "hidden",
                "inner",
                "heads",
                "kv_heads",
                "dim",
                "vocab",
                "longest",
                "blocks",
                "table_width",
                "block_tokens",
                "block_stride",
                "head_stride",
                "interleaved",
            )
        ),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class StepBatch(NamedTuple):
    """The tokens of one pass: S rows, sequence after sequence; everything contiguous.

    Attributes:
        ids: int64 [S].
        positions: int64 [S], where they go in their sequences.
        owners: int64 [S], each row's sequence.
        starts: int64 [n], position of each sequence's first row.
        counts: int64 [n], its rows, >= 1.
        tables: int32 [n, B], the blocks of each sequence.
        asked: int64 [m], the rows whose logits are wanted, ascending.
    """

    ids: Tensor
    positions: Tensor
    owners: Tensor
    starts: Tensor
    counts: Tensor
    tables: Tensor
    asked: Tensor

    @classmethod
    def of(cls, ids: Tensor, starts: Sequence[int], counts: Sequence[int], tables: Tensor):
        """Every row's logits are wanted. The arguments are those of the attributes."""
        first, rows = torch.tensor(starts), torch.tensor(counts)
        owners = torch.repeat_interleave(torch.arange(len(rows)), rows)
        every = torch.arange(len(owners))
        positions = every - (rows.cumsum(0) - rows - first)[owners]
        return cls(ids, positions, owners, first, rows, tables, every)


class CompiledStep:
    """Feeds tokens to a decoder, on torch's number of threads. Make one with `create`.

    With packed products, its logits, keys and values are to the bit those of the decoder inside
    `row_independent`. Without, it packs a copy of every matrix, so `repack` must follow every
    change of the weights.

    Args:
        model: the decoder to mirror.
        cache: where its keys and values are.
        longest: most tokens of a sequence.
        products: the packed linear layers of the model, if it has them.
    """

    def __init__(
        self, model: Decoder, cache: GroupedCache, longest: int, products: PackedProducts | None
    ) -> None:
        self._model = model
        self._cache = cache
        self._products = products
        self._bfloat16 = model.embed.weight.dtype == torch.bfloat16
        shape = model.config
        self._layers = (_Layer * shape.num_layers)()
        self._pages = LargePages()
        self._copies: list[tuple[PackedMatrix, Tensor]] = []
        self._biases: list[tuple[Tensor, Tensor]] = []
        self._logits = torch.empty(0)
        self._step = _Step(
            layers=ctypes.addressof(self._layers),
            embedding=model.embed.weight.data_ptr(),
            final_norm=model.norm.weight.data_ptr(),
            cosine=model.cos.data_ptr(),
            sine=model.sin.data_ptr(),
            num_layers=shape.num_layers,
            hidden=shape.hidden_size,
            inner=shape.intermediate_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            dim=shape.head_dim,
            vocab=shape.vocab_size,
            longest=longest,
            blocks=cache.blocks,
            block_tokens=cache.block_tokens,
            block_stride=cache.keys[0].stride(0),
            head_stride=cache.keys[0].stride(1),
            interleaved=shape.rope_interleaved,
            epsilon=shape.norm_eps,
            scale=shape.head_dim**-0.5,
        )
        self._pointer = ctypes.addressof(self._step)
        for layer, block, keys, values in zip(
            self._layers, model.layers, cache.keys, cache.values, strict=True
        ):
            self._describe(layer, cast(Block, block), keys, values)
        head = self._packed(model.output_weight) if products is None else products.head
        self._step.head = self._matrix(head, None)

    @classmethod
    def create(
        cls,
        model: Decoder,
        cache: PagedCache,
        longest: int,
        products: PackedProducts | None = None,
    ) -> "CompiledStep | None":
        """The compiled step of a model with values in it, or None where it cannot be had."""
        if not isinstance(cache, GroupedCache) or not _mirrors(model):
            return None
        reason = build.unavailable_reason()
        if reason is not None:
            _log.info("no compiled decode step (%s); decoding at lower speed", reason)
            return None
        if REGISTRY.wanted() not in (None, "cpu"):
            return None  # The ops of another backend were asked for.
        step = cls(model, cache, longest, products)
        error = step._error()
        if not error <= (_TOLERANCE if products is None else 0.0):
            _log.warning("compiled decode step is off by %s; decoding without it", error)
            return None
        return step

    @torch.no_grad()
    def repack(self) -> None:
        """Take over the model's present weights; packed products are repacked by their owner."""
        for matrix, weight in self._copies:
            matrix.repack_(weight)
        for copy, bias in self._biases:
            copy.copy_(bias)

    def __call__(self, batch: StepBatch) -> Tensor:
        """Logits float32 [m, V] after feeding the tokens of a pass; the next call overwrites them.

        Raises:
            IndexError: a token, position, row or block that does not exist.
        """
        step = self._step
        asked = len(batch.asked)
        if asked * step.vocab > len(self._logits):
            # Kept: fresh memory would cost as much as the product that fills it.
            self._logits = LargePages().zeros((asked * step.vocab,), torch.float32)
        step.n, step.sequences, step.num_asked = len(batch.ids), len(batch.starts), asked
        for name, values in zip(batch._fields, batch, strict=True):
            setattr(step, name, values.data_ptr())
        step.table_width = batch.tables.shape[1]
        step.logits = self._logits.data_ptr()
        build.call("decode_step", torch.get_num_threads(), self._bfloat16, self._pointer)
        return self._logits[: asked * step.vocab].view(asked, step.vocab)

    def _describe(self, layer: _Layer, block: Block, keys: Tensor, values: Tensor) -> None:
        attention, feed_forward = block.parts()
        assert isinstance(attention, GroupedQueryAttention)
        assert isinstance(feed_forward, SwiGLU)
        norms = {
            "attention_norm": block.attention_norm,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
            "feed_forward_norm": block.feed_forward_norm,
        }
        for name, norm in norms.items():
            setattr(layer, name, None if norm is None else norm.weight.data_ptr())
        layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        linears = {
            "qkv": attention.qkv,
            "output": attention.output,
            "gate_up": feed_forward.gate_up,
            "down": feed_forward.down,
        }
        for name, linear in linears.items():
            own = isinstance(linear, PackedLinear)
            matrix = linear.matrix if own else self._packed(linear.weight)
            setattr(layer, name, self._matrix(matrix, linear.bias))

    def _packed(self, weight: Tensor) -> PackedMatrix:
        """A copy that `repack` keeps up with `weight`."""
        matrix = PackedMatrix.pack(weight, "bfloat16" if self._bfloat16 else "float32", self._pages)
        self._copies.append((matrix, weight))
        return matrix

    def _matrix(self, matrix: PackedMatrix, bias: Tensor | None) -> _Matrix:
        copy = None
        if bias is not None:
            # Not an inference tensor, which could not be written to outside of inference_mode.
            with torch.inference_mode(False):
                copy = bias.detach().clone().float()
            self._biases.append((copy, bias))
        return _Matrix(
            panels=matrix.data.data_ptr(),
            scales=None if matrix.scales is None else matrix.scales.data_ptr(),
            bias=None if copy is None else copy.data_ptr(),
            kind=KINDS.index(matrix.kind),
            inputs=matrix.inputs,
            outputs=matrix.outputs,
        )

    @torch.inference_mode()
    def _error(self) -> float:
        """Largest log-probability difference to the decoder over a few tokens of two sequences.

        Writes to the first blocks, so it runs before the cache is in use.
        """
        size, shape = self._cache.block_tokens, self._model.config
        tokens = min(4, int(self._step.longest))
        each = -(-tokens // size)
        rows = min(2, self._cache.blocks // each)
        other = GroupedCache(
            layers=shape.num_layers,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            blocks=rows * each,
            block_tokens=size,
            dtype=self._cache.keys.dtype,
        )
        tables = torch.arange(rows * each, dtype=torch.int32).view(rows, each)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, shape.vocab_size, (tokens, rows), generator=generator)
        worst = 0.0
        for at in range(tokens):
            batch = PagedBatch.of([at] * rows, [1] * rows, tables, size)
            other.begin(batch)
            with row_independent():
                hidden = self._model(ids[at][None], batch.positions[None], other)[0]
            products = self._products
            logits = self._model.logits(hidden) if products is None else products.logits(hidden)
            want = logits.float().log_softmax(-1)
            if not bool(want.isfinite().all()):
                return 0.0  # Nothing to compare with; every request will fail either way.
            once = StepBatch.of(ids[at], [at] * rows, [1] * rows, tables)
            got = self(once).float().log_softmax(-1)
            error = float((got - want).abs().max())
            worst = max(worst, error) if error == error else float("inf")
        return worst


def _mirrors(model: Decoder) -> bool:
    """Whether the native step knows such a model: its parts, its one dtype, and its device."""
    dtype = model.embed.weight.dtype
    return (
        dtype in (torch.float32, torch.bfloat16)
        and all(p.dtype == dtype and p.device.type == "cpu" for p in model.parameters())
        and all(
            isinstance(attention, GroupedQueryAttention) and isinstance(feed_forward, SwiGLU)
            for attention, feed_forward in (cast(Block, block).parts() for block in model.layers)
        )
    )


class StepBuffers:
    """The batch of a pass. Block tables are kept from pass to pass: what stayed the same is not
    written again.

    Args:
        rows: most tokens of a pass.
        sequences: most of them at once.
        longest: most tokens of a sequence.
        block_tokens: tokens of a block.
    """

    def __init__(self, rows: int, sequences: int, longest: int, block_tokens: int) -> None:
        self._ids = np.zeros(rows, dtype=np.int64)
        self._positions = np.zeros(rows, dtype=np.int64)
        self._owners = np.zeros(rows, dtype=np.int64)
        self._starts = np.zeros(sequences, dtype=np.int64)
        self._counts = np.zeros(sequences, dtype=np.int64)
        self._asked = np.zeros(sequences, dtype=np.int64)
        self._tables = np.full((sequences, -(-longest // block_tokens)), -1, dtype=np.int32)
        # What is written of each row of the tables: a sequence's own list, and how many of it.
        self._blocks: list[list[int]] = [[] for _ in range(sequences)]
        self._written = [0] * sequences

    def update(self, chunks: Sequence[Chunk]) -> StepBatch:
        """The batch of these chunks, which asks for the last row of those that sample; the next
        call changes it."""
        row = asked = 0
        for index, chunk in enumerate(chunks):
            sequence, start, count = chunk.sequence, chunk.start, chunk.count
            self._starts[index], self._counts[index] = start, count
            if count == 1:
                self._ids[row] = sequence.tokens[start]
                self._positions[row] = start
                self._owners[row] = index
            else:
                rows = slice(row, row + count)
                self._ids[rows] = sequence.tokens[start : start + count]
                self._positions[rows] = np.arange(start, start + count)
                self._owners[rows] = index
            row += count
            if chunk.samples:
                self._asked[asked] = row - 1
                asked += 1
            self._write_table(index, sequence.blocks)
        n = len(chunks)
        parts = (self._ids[:row], self._positions[:row], self._owners[:row])
        parts = (*parts, self._starts[:n], self._counts[:n], self._tables[:n], self._asked[:asked])
        return StepBatch(*map(torch.from_numpy, parts))

    def _write_table(self, row: int, blocks: list[int]) -> None:
        # While a sequence runs its list only grows, and it is another list afterwards.
        written = self._written[row] if self._blocks[row] is blocks else 0
        if written != len(blocks):
            self._tables[row, written : len(blocks)] = blocks[written:]
            self._blocks[row], self._written[row] = blocks, len(blocks)
