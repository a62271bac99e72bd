"""Writing and reading a sandbox's work folder without trusting what is in it.

Everything goes through directory descriptors and never follows a link, so a link planted by a
command leads nowhere. Depth, number and bytes of what is read are bounded.
"""

import contextlib
import os
import stat
from collections.abc import Mapping

from headrace.sandbox.types import FileEntry

DEEPEST = 64
"""Folders below the work folder that are looked into; deeper ones are listed as empty."""
MOST_NAME_BYTES = 16 * 2**20
"""Bytes of all paths of a tree together."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe would wait for its writer.
_READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def check_path(path: bytes) -> None:
    """Refuse a path that is not plainly relative.

    Raises:
        ValueError: empty, absolute, too deep, or with empty, "." or ".." parts or NUL bytes.
    """
    parts = path.split(b"/")
    if b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        raise ValueError(f"path {os.fsdecode(path)!r} must be relative, without empty or dot parts")
    if len(parts) > DEEPEST:
        raise ValueError(f"path {os.fsdecode(path)!r} is deeper than {DEEPEST} folders")


def write_tree(root: str, files: Mapping[bytes, FileEntry]) -> None:
    """Create `files` in the folder `root`. Missing parents are made with mode 0o755.

    Raises:
        ValueError: a bad path or kind, or an entry below something that is not a folder.
        OSError: the disk limit is reached.
    """
    modes: list[tuple[bytes, int]] = []
    # Parents sort before their children, so a folder given explicitly is made first.
    for path in sorted(files):
        entry = files[path]
        check_path(path)
        *parents, name = path.split(b"/")
        folder = os.open(root, _FOLDER)
        try:
            for part in parents:
                folder = _enter(folder, part)
            _create(folder, name, entry)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"{os.fsdecode(path)!r} collides with another entry") from error
        finally:
            os.close(folder)
        if entry.kind == "dir":
            modes.append((path, entry.mode))
    # Modes of folders come last and from the inside out: they may forbid entering.
    for path, mode in reversed(modes):
        os.chmod(os.path.join(os.fsencode(root), path), stat.S_IMODE(mode))


def _enter(folder: int, part: bytes) -> int:
    """Descriptor of a sub-folder, made if missing; `folder` is closed in its favour."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, 0o755, dir_fd=folder)
    inner = os.open(part, _FOLDER, dir_fd=folder)
    os.close(folder)
    return inner


def _create(folder: int, name: bytes, entry: FileEntry) -> None:
    if entry.kind == "dir":
        os.mkdir(name, 0o700, dir_fd=folder)
    elif entry.kind == "link":
        os.symlink(entry.data, name, dir_fd=folder)
    elif entry.kind == "file":
        file = os.open(name, _NEW_FILE, 0o600, dir_fd=folder)
        try:
            view = memoryview(entry.data)
            while view:
                view = view[os.write(file, view) :]
            os.fchmod(file, stat.S_IMODE(entry.mode))
        finally:
            os.close(file)
    else:
        raise ValueError(f"kind {entry.kind!r} of {os.fsdecode(name)!r} is not file, dir or link")


def read_tree(root: str, *, most_bytes: int) -> dict[bytes, FileEntry]:
    """Everything below the folder `root`, by relative path.

    Pipes, sockets and device nodes get kind "other". Left out are content beyond `most_bytes` in
    all (sparse files can claim more than the disk holds), content that cannot be read, and entries
    after the first MOST_NAME_BYTES of paths.

    Raises:
        OSError: `root` itself cannot be read.
    """
    found: dict[bytes, FileEntry] = {}
    remaining = most_bytes
    names = MOST_NAME_BYTES
    waiting = [b""]
    while waiting:
        prefix = waiting.pop()
        folder = _open_below(root, prefix)
        if folder is None:
            continue
        try:
            for name in sorted(os.listdir(folder)):
                raw = os.fsencode(name)
                path = prefix + b"/" + raw if prefix else raw
                entry = _read_entry(folder, raw, remaining)
                names -= len(path)
                if names < 0:
                    return found
                if entry is None:
                    continue
                found[path] = entry
                remaining -= len(entry.data)
                if entry.kind == "dir" and path.count(b"/") < DEEPEST - 1:
                    waiting.append(path)
        finally:
            os.close(folder)
    return found


def _open_below(root: str, path: bytes) -> int | None:
    """Descriptor of the folder `path` below `root`; None if it vanished or cannot be entered."""
    folder = os.open(root, _FOLDER)
    for part in path.split(b"/") if path else []:
        try:
            inner = os.open(part, _FOLDER, dir_fd=folder)
        except OSError:
            return None
        finally:
            os.close(folder)
        folder = inner
    return folder


def _read_entry(folder: int, name: bytes, most_bytes: int) -> FileEntry | None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            return FileEntry("dir", mode)
        if stat.S_ISLNK(status.st_mode):
            return FileEntry("link", mode, os.readlink(name, dir_fd=folder))
        if not stat.S_ISREG(status.st_mode):
            return FileEntry("other", mode)
    except OSError:
        return None  # It vanished: a command of the same sandbox is running.
    try:
        file = os.open(name, _READ_FILE, dir_fd=folder)
    except OSError:
        return FileEntry("file", mode)
    try:
        return FileEntry("file", mode, _read(file, min(most_bytes, status.st_size)))
    finally:
        os.close(file)


def _read(file: int, count: int) -> bytes:
    chunks = []
    while count > 0:
        chunk = os.read(file, min(count, 1 << 20))
        if not chunk:
            break
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
