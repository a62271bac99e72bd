"""Weight versions in shared memory: one process publishes, any number on the machine load.

A version is a directory of two files: all tensors one after the other, and a manifest that says
where each lies, what it is and what its bytes sum to. It appears whole or not at all and never
changes again. A reader maps the file, checks what it is going to take, and copies only tensors
whose checksum is not the one it holds; a reader that finds anything wrong has changed nothing.
"""

import hashlib
import math
import mmap
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.model.checkpoint import check_architecture, stored_dtype
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.directory_swap import replaced_directory
from headrace.model.shared_folder import PUBLISHED_SUFFIX

MANIFEST_FILE = "manifest.json"
TENSORS_FILE = "tensors.bin"
_ALIGNMENT = 64
_ROW_WORDS = 512
# Small enough for a core's own cache: it is read twice.
_SLAB_BYTES = 1 << 19
_AGAIN = "publish the version again, or load a checkpoint directory"


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a published version.

    Attributes:
        dtype: torch's name of it.
        shape: sizes.
        offset: of the first byte in the tensors' file.
        nbytes: how many there are, row-major.
        checksum: of them, 64 bits.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a published version but the bytes.

    Attributes:
        version: its number.
        size: bytes of the tensors' file.
        tensors: by Hugging Face name.
        config: of the model, as in config.json; None if it was not given.
        previous_version: published before into the same folder, None for the first.
        previous: that version's checksums, by name.
    """

    version: int
    size: int
    tensors: dict[str, TensorEntry]
    config: dict[str, Any] | None = None
    previous_version: int | None = None
    previous: dict[str, int] = {}


class LoadReport(NamedTuple):
    """What an update moved.

    Attributes:
        bytes_copied: written to the model, in its own dtype.
        tensors_changed: how many tensors these are.
        seconds: checking and copying.
    """

    bytes_copied: int
    tensors_changed: int
    seconds: float


# -- writing -----------------------------------------------------------------------------------


@torch.no_grad()
def publish(
    tensors: Mapping[str, Tensor],
    folder: Path,
    version: int,
    keep: int = 2,
    *,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a version; readers see it whole, and only once it is.

    Of older versions the newest ones stay, so that a reader that was told of one just before can
    still open it. One that is removed later lives on in every process that has it mapped.

    Args:
        tensors: by Hugging Face name; any device and layout.
        folder: of this model's versions, see `shared_folder`; made if missing, for this user.
        version: its number, >= 0; an older version of this number is replaced.
        keep: versions that stay, this one included; >= 2.
        dtype: what the tensors are stored as, with the exceptions of a checkpoint; None keeps
            each one's own.
        config: contents of the model's config.json; readers then check it, and can make a model.

    Returns:
        The version's directory, to be handed to readers.

    Raises:
        UserError: it cannot be written; older versions are as they were.
        ValueError: nothing to publish, or `version` or `keep` out of range.
    """
    if version < 0 or keep < 2 or not tensors:
        raise ValueError(
            f"publish: {len(tensors)} tensors, version {version}, keep {keep}; "
            "at least one tensor, version >= 0 and keep >= 2 are needed"
        )
    target = folder / f"v{version:08d}{PUBLISHED_SUFFIX}"
    try:
        _claim(folder)
        others = [path for path in _versions(folder) if path != target]
        previous = _previous(others, version)
        with replaced_directory(target) as draft:
            entries = _write(tensors, draft / TENSORS_FILE, dtype)
            manifest = Manifest(
                version=version,
                size=(draft / TENSORS_FILE).stat().st_size,
                tensors=entries,
                config=None if config is None else dict(config),
                previous_version=None if previous is None else previous.version,
                previous={} if previous is None else checksums_of(previous),
            )
            (draft / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    except OSError as error:
        raise UserError(
            f"weights {target}: cannot be written ({error.strerror or error}); "
            f"free memory in {folder.parent}, or hand weights over as checkpoints on disk"
        ) from error
    for old in others[: -(keep - 1)]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _claim(folder: Path) -> None:
    """Make the folder, or see that it is this user's: anybody may write to shared memory."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(0, "the folder belongs to another user")


def _versions(folder: Path) -> list[Path]:
    """All published versions, oldest number first."""
    found = [
        (int(path.stem[1:]), path)
        for path in folder.glob(f"v*{PUBLISHED_SUFFIX}")
        if path.stem[1:].isdigit()
    ]
    return [path for _, path in sorted(found)]


def _previous(others: Sequence[Path], version: int) -> Manifest | None:
    """What was published before `version`; None if that is nothing, or not readable any more."""
    before = [path for path in others if int(path.stem[1:]) < version]
    if before:
        with suppress(UserError):
            return _read_manifest(before[-1])
    return None


def _write(
    tensors: Mapping[str, Tensor], file: Path, dtype: torch.dtype | None
) -> dict[str, TensorEntry]:
    """Fill the tensors' file; returns what the manifest says of it."""
    entries: dict[str, TensorEntry] = {}
    # Not through a mapping: that takes a page fault for every 4 KiB, and a full file system would
    # end the process instead of raising.
    with file.open("wb") as opened:
        for name, tensor in tensors.items():
            kept = tensor.detach().to("cpu", stored_dtype(name, tensor, dtype)).contiguous()
            data = kept.view(-1).view(torch.uint8).numpy().data
            offset = opened.tell()
            opened.write(data)
            opened.write(bytes(-len(data) % _ALIGNMENT))
            dtype_name = str(kept.dtype).removeprefix("torch.")
            shape = tuple(kept.shape)
            entries[name] = TensorEntry(dtype_name, shape, offset, len(data), checksum(data))
    return entries


# -- reading -----------------------------------------------------------------------------------


class SharedWeights:
    """A published version, mapped. Nothing is read before it is asked for.

    The mapping lasts as long as this object or a tensor taken from it, also when the version is
    removed meanwhile.
    """

    def __init__(self, path: Path, manifest: Manifest, mapped: mmap.mmap) -> None:
        self.path = path
        self.manifest = manifest
        self._mapped = mapped

    @classmethod
    def open(cls, path: str | Path) -> "SharedWeights":
        """Map a version.

        Raises:
            UserError: it is missing, truncated, or its manifest is corrupt.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        file = path / TENSORS_FILE
        try:
            with file.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                if size != manifest.size:
                    raise UserError(
                        f"weights {path}: {TENSORS_FILE} has {size} bytes but {MANIFEST_FILE} "
                        f"promises {manifest.size}; {_AGAIN}"
                    )
                # Private: whoever writes to a tensor by mistake changes nobody else's.
                mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise UserError(
                f"weights {path}: {TENSORS_FILE} cannot be read ({error.strerror or error}); "
                f"{_AGAIN}"
            ) from error
        return cls(path, manifest, mapped)

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version

    @property
    def names(self) -> list[str]:
        """Hugging Face names of its tensors, in the order they lie in."""
        return list(self.manifest.tensors)

    @property
    def checksums(self) -> dict[str, int]:
        """By name; what a reader holds after it has taken everything."""
        return checksums_of(self.manifest)

    def changed(self, held: Mapping[str, int]) -> list[str]:
        """Names whose tensors a reader has to take.

        Args:
            held: checksums of what it has, by name; `manifest.previous` for what this version
                changed.
        """
        return [n for n, entry in self.manifest.tensors.items() if held.get(n) != entry.checksum]

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read tensors and compare them with their checksums; None is all.

        Raises:
            UserError: one differs.
            KeyError: no tensor of that name.
        """
        chosen = self.names if names is None else list(names)
        entries = [self.manifest.tensors[name] for name in chosen]
        for name, entry, found in zip(
            chosen, entries, _checksums(self._mapped, entries), strict=True
        ):
            if found != entry.checksum:
                raise UserError(
                    f"weights {self.path}: the bytes of {name} in {TENSORS_FILE} do not match "
                    f"their checksum; {_AGAIN}"
                )

    def tensor(self, name: str) -> Tensor:
        """A view of the mapping, on the CPU: copy it to keep it. KeyError for an unknown name."""
        return _view(self._mapped, self.manifest.tensors[name])


@torch.no_grad()
def load_shared_into(
    model: Decoder, path: str | Path, held: dict[str, int], *, version: int | None = None
) -> LoadReport:
    """Bring a model to a published version in place; nothing is reallocated.

    Everything that will be copied is checked first, and the rest is what the model holds already:
    an error leaves the model and `held` as they were.

    Args:
        model: whose weights `held` describes; another dtype than the published one is converted.
        path: the version's directory.
        held: checksums of the version the model has now, by name; empty if it has another origin.
            Is brought up to date.
        version: what the version must be; None is any.

    Raises:
        UserError: a missing, truncated or corrupt file, another version, another architecture.
    """
    started = time.perf_counter()
    weights = SharedWeights.open(path)
    if version is not None and weights.version != version:
        raise UserError(
            f"weights {path}: are version {weights.version}, not {version}; give the path that "
            f"version {version} was published to"
        )
    targets = model.hf_tensors()
    _check_fits(weights, model.config, targets)
    changed = weights.changed(held)
    weights.verify(changed)
    held.clear()
    for name in changed:
        targets[name].copy_(weights.tensor(name))
    held.update(weights.checksums)
    copied = sum(targets[name].nbytes for name in changed)
    return LoadReport(copied, len(changed), time.perf_counter() - started)


def load_shared(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Decoder:
    """Build a decoder from a published version, as `load_checkpoint` does from a directory.

    Raises:
        UserError: a missing, truncated or corrupt file, or one published without a config.
    """
    config = SharedWeights.open(path).manifest.config
    if config is None:
        raise UserError(
            f"weights {path}: were published without the model's config; "
            "load them into a running model, or start from a checkpoint directory"
        )
    model = Decoder(_config_of(path, config), device=device, dtype=dtype)
    load_shared_into(model, path, {})
    return model


def checksums_of(manifest: Manifest) -> dict[str, int]:
    """Checksums of a version's tensors, by name."""
    return {name: entry.checksum for name, entry in manifest.tensors.items()}


# -- parts -------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except OSError as error:
        raise UserError(
            f"weights {path}: {MANIFEST_FILE} cannot be read ({error.strerror}); the version was "
            f"removed or never published: {_AGAIN}"
        ) from error
    except msgspec.MsgspecError as error:
        raise UserError(
            f"weights {path}: {MANIFEST_FILE} is corrupt ({error}); {_AGAIN}"
        ) from error
    for name, entry in manifest.tensors.items():
        dtype = getattr(torch, entry.dtype, None)
        if (
            not isinstance(dtype, torch.dtype)
            or min(entry.shape, default=0) < 0
            or entry.nbytes != math.prod(entry.shape) * dtype.itemsize
            or not 0 <= entry.offset <= manifest.size - entry.nbytes
            or entry.offset % _ALIGNMENT
        ):
            raise UserError(
                f"weights {path}: {MANIFEST_FILE} is corrupt (tensor {name} is {entry.dtype} "
                f"{list(entry.shape)} in {entry.nbytes} bytes at {entry.offset} of "
                f"{manifest.size}); {_AGAIN}"
            )
    return manifest


def _check_fits(weights: SharedWeights, config: ModelConfig, targets: Mapping[str, Tensor]) -> None:
    """Refuse a version of another model."""
    path, stored = weights.path, weights.manifest.config
    if stored is not None:
        check_architecture(config, _config_of(path, stored), f"weights {path}")
    found = weights.manifest.tensors
    for problem, names in (
        ("lack", targets.keys() - found.keys()),
        ("have the unexpected", found.keys() - targets.keys()),
    ):
        if names:
            raise UserError(
                f"weights {path}: {problem} tensor {min(names)} ({len(names)} such); "
                "publish a version of the running model"
            )
    for name, target in targets.items():
        if found[name].shape != tuple(target.shape):
            raise UserError(
                f"weights {path}: {name} has shape {list(found[name].shape)}, the running model's "
                f"has {list(target.shape)}; publish a version of the running model"
            )


def _config_of(path: str | Path, config: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.from_hf(config)
    except UserError as error:
        raise UserError(f"weights {path}: {error}") from error


def _view(mapped: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    rows = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    return rows.view(dtype).view(entry.shape)


def _checksums(mapped: mmap.mmap, entries: Sequence[TensorEntry]) -> list[int]:
    """Of each entry's bytes, with as many threads as torch may use; hashing lets others run."""
    data = memoryview(mapped)

    def of(entry: TensorEntry) -> int:
        return checksum(data[entry.offset : entry.offset + entry.nbytes])

    threads = torch.get_num_threads()
    if threads == 1:
        return [of(entry) for entry in entries]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(of, entries))


def checksum(data: memoryview) -> int:
    """64 bits: BLAKE2b of the sums of all rows and all columns of the bytes laid out as a table.

    Engines wait while this is computed, and CRC-32 or BLAKE2b of all bytes would take several times
    as long as copying them. Sums run at the speed of memory, modulo 2^64 over 8-byte words. They
    miss no change of fewer than four words, none within a row or a column, and others by a chance
    of 2^-64; 32 bits would be too few for what also decides which tensors are left as they are.
    """
    digest = hashlib.blake2b(digest_size=8)
    columns = np.zeros(_ROW_WORDS, dtype=np.uint64)
    whole = len(data) - len(data) % (8 * _ROW_WORDS)
    for start in range(0, whole, _SLAB_BYTES):
        count = min(_SLAB_BYTES, whole - start) // 8
        slab = np.frombuffer(data, np.uint64, count, start).reshape(-1, _ROW_WORDS)
        columns += slab.sum(0)
        digest.update(slab.sum(1).tobytes())
    digest.update(columns.tobytes())
    digest.update(data[whole:])
    return int.from_bytes(digest.digest(), "little")
