"""The compiled library behind the fast CPU ops: built on first use, cached, called through ctypes.

The C++ files beside this module know no torch: they take pointers and sizes, so that a build takes
seconds and a call releases the GIL. Which instructions run (AMX, AVX-512, AVX2, portable) is chosen
at run time, so one build serves every processor of an architecture.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

from torch import Tensor

_FOLDER = Path(__file__).parent
_SOURCES = (
    "decode_step.cpp",
    "dispatch.cpp",
    "draws.cpp",
    "elementwise.cpp",
    "indexer.cpp",
    "latent.cpp",
    "latent_amx.cpp",
    "paged.cpp",
    "paged_amx.cpp",
    "packed.cpp",
    "packed_amx.cpp",
    "packed_grouped.cpp",
    "select.cpp",
    "select_amx.cpp",
)
# A product and a sum may become one instruction (the same everywhere in one kernel); nothing that
# would change NaN or the order of sums.
_FLAGS = (
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
)
LEVELS = ("portable", "avx2", "avx512", "amx")
"""Instruction levels, ascending; the number of a level is its index."""

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    # Each begins with level, threads, dtype.
    "headrace_select_topk": (*(_POINTER,) * 5, *(_SIZE,) * 5, _POINTER),
    "headrace_latent_forward": (*(_POINTER,) * 3, *(_SIZE,) * 6, _FLOAT, *(_POINTER,) * 3),
    "headrace_latent_backward": (*(_POINTER,) * 6, *(_SIZE,) * 6, _FLOAT, *(_POINTER,) * 2),
    "headrace_indexer_forward": (*(_POINTER,) * 4, *(_SIZE,) * 5, _POINTER),
    "headrace_indexer_backward": (*(_POINTER,) * 5, *(_SIZE,) * 5, *(_POINTER,) * 3),
    "headrace_paged_attention": (*(_POINTER,) * 6, *(_SIZE,) * 11, _FLOAT, _POINTER),
    "headrace_decode_step": (_POINTER,),
    "headrace_pack_matrix": (_POINTER, _SIZE, _INT, _SIZE, _SIZE, _POINTER, _POINTER),
    "headrace_packed_linear": (_POINTER, _SIZE, *(_POINTER,) * 3, _INT, *(_SIZE,) * 3, _POINTER),
    "headrace_packed_grouped": (*(_POINTER,) * 3, _INT, _POINTER, *(_SIZE,) * 4, _POINTER),
    "headrace_draw_tokens": (*(_POINTER,) * 3, _SIZE, _SIZE, *(_POINTER,) * 3),
    "headrace_token_logprobs": (*(_POINTER,) * 2, *(_SIZE,) * 3, _POINTER),
    "headrace_rms_norm_forward": (*(_POINTER,) * 2, *(_SIZE,) * 5, _INT, _FLOAT, *(_POINTER,) * 2),
    "headrace_rms_norm_backward": (*(_POINTER,) * 4, *(_SIZE,) * 5, _INT, *(_POINTER,) * 2),
    "headrace_swiglu_forward": (_POINTER, _SIZE, _SIZE, _POINTER),
    "headrace_swiglu_backward": (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER),
    "headrace_rotate": (*(_POINTER,) * 3, *(_SIZE,) * 7, *(_INT,) * 4, _POINTER),
}
_forced: ContextVar[int | None] = ContextVar("headrace_native_level", default=None)


class NativeUnavailable(RuntimeError):
    """The library cannot be built or loaded here; the message says why, on one line."""


def unavailable_reason() -> str | None:
    """Why the library cannot be used on this machine, None when it can. Builds it if need be."""
    found = _library()
    return found if isinstance(found, str) else None


def level() -> str:
    """The instruction level in use, one of LEVELS.

    Raises:
        NativeUnavailable: there is no library here.
    """
    return LEVELS[_level(_loaded())]


@contextlib.contextmanager
def use_level(name: str) -> Iterator[None]:
    """Run at `name` or below inside the with-statement; never above what the processor has.

    Raises:
        ValueError: no such level.
    """
    if name not in LEVELS:
        raise ValueError(f'unknown instruction level "{name}"; one of {", ".join(LEVELS)}')
    token = _forced.set(LEVELS.index(name))
    try:
        yield
    finally:
        _forced.reset(token)


def call(function: str, threads: int, bfloat16: bool, *arguments: Tensor | int | float | None):
    """Call `headrace_<function>`. Tensors are passed as pointers and must be contiguous.

    Raises:
        NativeUnavailable: there is no library here.
        IndexError: an index or a range lies outside the rows it selects from.
        MemoryError: no memory for working space.
    """
    entry, best = _entry(function)
    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    forced = _forced.get()
    level = best if forced is None else min(best, forced)
    status = entry(level, max(1, threads), bfloat16, *values)
    if status == 0:
        return
    if status == 1:
        raise IndexError(f"{function}: an index lies outside the rows it selects from")
    if status == 2:
        raise MemoryError(f"{function}: no memory for working space")


@functools.cache
def _entry(function: str) -> tuple[Callable[..., int], int]:
    """The function `headrace_<function>`, and the best level of this processor."""
    library = _loaded()
    return getattr(library, f"headrace_{function}"), library.headrace_level()


def _level(library: ctypes.CDLL) -> int:
    best = library.headrace_level()
    forced = _forced.get()
    return best if forced is None else min(best, forced)


def _loaded() -> ctypes.CDLL:
    found = _library()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        return "no C++ compiler found (install g++, or point CXX at one)"
    try:
        library = ctypes.CDLL(str(_build(compiler)))
        for name, arguments in _SIGNATURES.items():
            entry = getattr(library, name)
            entry.argtypes = (_INT, _INT, _INT, *arguments)
            entry.restype = _INT
        library.headrace_level.argtypes = ()
        library.headrace_level.restype = _INT
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error" in line), lines[0])
        return f"the native ops did not build: {reason.strip()}"
    return library


def _build(compiler: str) -> Path:
    """Path of the library; compiled unless the same source was, by the same compiler."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout.partition("\n")[0]
    identity = [f"{compiler} {version} {platform.machine()} {' '.join(_FLAGS)}".encode()]
    for pattern in ("*.cpp", "*.inl", "*.h"):
        identity += [path.read_bytes() for path in sorted(_FOLDER.glob(pattern))]
    name = f"ops-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:24]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    target = cache / f"{name}.so"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Built in a folder of our own and renamed: no process loads half a file, and none waits for
    # the lock file of another one that died.
    with tempfile.TemporaryDirectory(dir=cache) as scratch, _own_programs_first():
        from torch.utils.cpp_extension import load

        load(
            name="headrace_ops",
            sources=[str(_FOLDER / source) for source in _SOURCES],
            extra_cflags=list(_FLAGS),
            extra_ldflags=["-fopenmp"],
            build_directory=scratch,
            is_python_module=False,
        )
        built = next(Path(scratch).glob("headrace_ops*.so"))
        os.replace(built, target)
    return target


@contextlib.contextmanager
def _own_programs_first() -> Iterator[None]:
    """Let the loader find the `ninja` of this environment even when it is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before))
    try:
        yield
    finally:
        os.environ["PATH"] = before
