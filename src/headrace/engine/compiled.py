"""The compiled decode step: one native call from token ids to logits.

`CompiledStep.create` describes a grouped-query decoder and its cache to the native library and
compares a few tokens with the decoder itself. Where there is no library, the model is of another
kind, or a result differs, it returns None and the engine decodes through the decoder, slower and
otherwise the same. It knows nothing of requests; `DecodeBatch` alone looks at sequences.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from headrace.engine.grouped_cache import GroupedCache
from headrace.engine.packed_model import PackedLinear, PackedProducts
from headrace.engine.paged_cache import PagedBatch, PagedCache
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
        *((name, _POINTER) for name in ("ids", "positions", "tables", "logits")),
        *(
            (name, _SIZE)
            for name in (
                "n",
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
                "interleaved",
            )
        ),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class CompiledStep:
    """Decodes one token for each of n sequences, on torch's number of threads. Make one with
    `create`.

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

    def __call__(self, ids: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Logits float32 [n, V] after feeding tokens to n sequences; the next call overwrites them.

        Args:
            ids: [n] int64, contiguous.
            positions: [n] int64, contiguous, where they go.
            tables: [n, B] int32, contiguous, the blocks of each sequence.

        Raises:
            IndexError: a token, position or block that does not exist.
        """
        step = self._step
        n = len(ids)
        if n * step.vocab > len(self._logits):
            # Kept: fresh memory would cost as much as the product that fills it.
            self._logits = LargePages().zeros((n * step.vocab,), torch.float32)
        step.n = n
        step.ids, step.positions = ids.data_ptr(), positions.data_ptr()
        step.tables, step.table_width = tables.data_ptr(), tables.shape[1]
        step.logits = self._logits.data_ptr()
        build.call("decode_step", torch.get_num_threads(), self._bfloat16, self._pointer)
        return self._logits[: n * step.vocab].view(n, -1)

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
            got = self(ids[at], batch.positions, tables).float().log_softmax(-1)
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


class DecodeBatch:
    """Ids, positions and block tables of the sequences that decode, kept from step to step: what
    stayed the same is not written again.

    Args:
        rows: most sequences at once.
        longest: most tokens of a sequence.
        block_tokens: tokens of a block.
    """

    def __init__(self, rows: int, longest: int, block_tokens: int) -> None:
        self._ids = np.zeros(rows, dtype=np.int64)
        self._positions = np.zeros(rows, dtype=np.int64)
        self._tables = np.full((rows, -(-longest // block_tokens)), -1, dtype=np.int32)
        # What is written of each row: a sequence's own list, and how many of it.
        self._blocks: list[list[int]] = [[] for _ in range(rows)]
        self._written = [0] * rows

    def update(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, positions, tables) of chunks of one token each; the next call changes them."""
        ids, positions = self._ids, self._positions
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            ids[row] = sequence.tokens[-1]
            positions[row] = chunk.start
            blocks = sequence.blocks
            # While a sequence runs its list only grows, and it is another list afterwards.
            written = self._written[row] if self._blocks[row] is blocks else 0
            if written != len(blocks):
                self._tables[row, written : len(blocks)] = blocks[written:]
                self._blocks[row], self._written[row] = blocks, len(blocks)
        n = len(chunks)
        return (
            torch.from_numpy(ids[:n]),
            torch.from_numpy(positions[:n]),
            torch.from_numpy(self._tables[:n]),
        )
