"""The decode step of small float32 models on one core, built with the machine's C compiler.

Where nothing is promised to the bit, sums may be reordered, and a handful of rows then goes through
attention faster than through kernels that serve prompts as well. `PlainStep.create` compiles
`plain_step.c`, packs the decoder's weights for it and compares a few tokens with the decoder. Where
there is no compiler, the model is of another kind, or a result differs, it returns None.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.cache.grouped import GroupedCache
from headrace.engine.cache.paged import PagedCache
from headrace.model.decoder import Decoder
from headrace.ops.pages import LargePages

_SOURCE = Path(__file__).with_name("plain_step.c")
# Sums may be reordered for vector units, but NaN must stay NaN: no -ffast-math.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-shared",
    "-fPIC",
)
_COMPILE_TIMEOUT_S = 120.0
_TOLERANCE = 1e-3
"""Largest accepted difference of log-probabilities to the decoder; a wrong step is off by units."""
_log = logging.getLogger(__name__)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_LAYER_FIELDS = (
    "attention_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "output",
    "output_bias",
    "feed_forward_norm",
    "gate_up",
    "down",
    "keys",
    "values",
)


class _Layer(ctypes.Structure):
    """`Layer` in the C file."""

    _fields_ = tuple((name, _POINTER) for name in _LAYER_FIELDS)


class _Step(ctypes.Structure):
    """`Step` in the C file."""

    _fields_ = (
        *(
            (name, _POINTER)
            for name in (
                "layers",
                "final_norm",
                "head",
                "cosine",
                "sine",
                "positions",
                "tables",
                "x",
                "logits",
                "scratch",
            )
        ),
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
                "table_width",
                "block_tokens",
                "block_stride",
                "head_stride",
                "interleaved",
            )
        ),
        ("epsilon", ctypes.c_float),
    )


class PlainStep:
    """Decodes one token for each of n sequences. Make one with `create`.

    Holds a packed copy of every matrix, so `repack` must follow every change of the weights.

    Args:
        library: the compiled file.
        model: the decoder to mirror.
        cache: where its keys and values are.
        longest: most tokens of a sequence.
    """

    def __init__(
        self, library: ctypes.CDLL, model: Decoder, cache: GroupedCache, longest: int
    ) -> None:
        self._library = library
        self._model = model
        self._cache = cache
        self._panel = int(library.panel_width())
        shape = model.config
        self._layers = (_Layer * shape.num_layers)()
        self._packed: dict[int, Tensor] = {}
        self._pages = LargePages()
        self._scratch = torch.empty(0)
        self._step = _Step(
            layers=ctypes.addressof(self._layers),
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
            block_tokens=cache.block_tokens,
            block_stride=cache.keys[0].stride(0),
            head_stride=cache.keys[0].stride(1),
            interleaved=shape.rope_interleaved,
            epsilon=shape.norm_eps,
        )
        self._pointer = ctypes.addressof(self._step)
        self.repack()

    @classmethod
    def create(cls, model: Decoder, cache: PagedCache, longest: int) -> "PlainStep | None":
        """The compiled step of a model with values in it, or None where it cannot be had."""
        if (
            not isinstance(cache, GroupedCache)
            or torch.get_num_threads() != 1  # it uses one core
            or any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters())
        ):
            return None
        library = _library()
        if library is None:
            return None
        step = cls(library, model, cache, longest)
        error = step._error()
        if not error <= _TOLERANCE:
            _log.warning("plain decode step is off by %s; decoding without it", error)
            return None
        return step

    @torch.no_grad()
    def repack(self) -> None:
        """Take over the model's present weights."""
        for target, block, keys, values in zip(
            self._layers, self._model.layers, self._cache.keys, self._cache.values, strict=True
        ):
            part: Any = block
            attention, feed_forward = part.attention, part.feed_forward
            q_norm, k_norm = attention.q_norm, attention.k_norm
            tensors = {
                "attention_norm": part.attention_norm.weight,
                "qkv": self._pack(attention.qkv.weight),
                "qkv_bias": attention.qkv.bias,
                "q_norm": None if q_norm is None else q_norm.weight,
                "k_norm": None if k_norm is None else k_norm.weight,
                "output": self._pack(attention.output.weight),
                "output_bias": attention.output.bias,
                "feed_forward_norm": part.feed_forward_norm.weight,
                "gate_up": self._pack(feed_forward.gate_up.weight),
                "down": self._pack(feed_forward.down.weight),
                "keys": keys,
                "values": values,
            }
            for name in _LAYER_FIELDS:
                tensor = tensors[name]
                setattr(target, name, None if tensor is None else tensor.data_ptr())
        head = self._model.lm_head or self._model.embed
        self._step.head = self._pack(head.weight).data_ptr()

    def _pack(self, weight: Tensor) -> Tensor:
        """[outputs, inputs] -> [panels, inputs, panel], zeros behind the last output."""
        missing = -weight.shape[0] % self._panel
        padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        panels = padded.view(-1, self._panel, weight.shape[1]).transpose(1, 2)
        packed = self._packed.get(id(weight))
        if packed is None:
            # Not an inference tensor, which could not be written to outside of inference_mode.
            with torch.inference_mode(False):
                packed = self._pages.zeros(panels.shape, torch.float32)
            self._packed[id(weight)] = packed
        return packed.copy_(panels)

    def __call__(self, ids: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Logits [n, V] after feeding tokens to n sequences.

        Args:
            ids: [n] int64, contiguous.
            positions: [n] int64, contiguous, where they go.
            tables: [n, B] int32, contiguous, the blocks of each sequence.
        """
        step = self._step
        n = len(ids)
        x = F.embedding(ids, self._model.embed.weight)
        logits = torch.empty((n, step.vocab))
        if step.n != n:
            step.n = n
            size = int(self._library.scratch_size(self._pointer))
            if size > len(self._scratch):
                self._scratch = torch.empty(size)
                step.scratch = self._scratch.data_ptr()
        step.x, step.logits = x.data_ptr(), logits.data_ptr()
        step.positions, step.tables = positions.data_ptr(), tables.data_ptr()
        step.table_width = tables.shape[1]
        self._library.decode_step(self._pointer)
        return logits

    @torch.inference_mode()
    def _error(self) -> float:
        """Largest log-probability difference to the decoder over a few tokens of two sequences.

        Writes to the first blocks, so it runs before the cache is in use.
        """
        tokens = min(4, int(self._step.longest))
        each = -(-tokens // self._cache.block_tokens)
        rows = min(2, self._cache.blocks // each)
        tables = torch.arange(rows * each, dtype=torch.int32).view(rows, each)
        generator = torch.Generator().manual_seed(0)
        vocab = self._model.config.vocab_size
        ids = torch.randint(0, vocab, (rows, tokens), generator=generator)
        want = self._model.logits(self._model(ids)).log_softmax(-1)
        if not bool(want.isfinite().all()):
            return 0.0  # Nothing to compare with; every request will fail whichever way it runs.
        worst = 0.0
        for at in range(tokens):
            positions = torch.full((rows,), at)
            got = self(ids[:, at].contiguous(), positions, tables).log_softmax(-1)
            error = float((got - want[:, at]).abs().max())
            worst = max(worst, error) if error == error else float("inf")
        return worst


@functools.cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        _log.info("no C compiler found; decoding at lower speed")
        return None
    try:
        library = ctypes.CDLL(str(_build(compiler)))
        library.panel_width.restype = _SIZE
        library.scratch_size.argtypes = (_POINTER,)
        library.scratch_size.restype = _SIZE
        library.decode_step.argtypes = (_POINTER,)
        library.decode_step.restype = None
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        _log.warning("no plain decode step (%s); decoding at lower speed", error)
        return None
    return library


def _build(compiler: str) -> Path:
    """Compile unless the same source was compiled for the same machine before."""
    identity = [_SOURCE.read_bytes(), compiler.encode(), _processor().encode()]
    identity += [flag.encode() for flag in _FLAGS]
    name = f"plain-step-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:24]}.so"
    target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Compiled beside the target and renamed, so that no process ever loads half a file.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(draft)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            reason = (done.stderr.strip() or "no message").splitlines()[0]
            raise OSError(f"{compiler} failed: {reason}")
        os.replace(draft, target)
    return target


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.machine()
