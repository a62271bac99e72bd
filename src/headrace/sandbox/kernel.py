"""The Linux calls a sandbox server makes on itself, through ctypes (Python 3.11 has none of them).

Each function is one system call with Python errors; what they are used for is isolation.py's story.
Only the server imports this module.
"""

import ctypes
import os
import platform
import signal
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
# mount_setattr has no glibc wrapper before 2.36; its number is the same on every architecture.
_NR_MOUNT_SETATTR = 442
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# System calls that let a process own kernel memory which no rlimit, tmpfs size or resident set
# shows (anonymous files, System V segments, key rings), and kernel interfaces that an agent's
# shell has no use for.
_DENIED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "add_key": 248,
        "request_key": 249, "keyctl": 250, "perf_event_open": 298, "memfd_create": 319,
        "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "memfd_secret": 447,
    },
    "aarch64": {
        "shmget": 194, "shmat": 196, "semget": 190, "msgget": 186, "add_key": 217,
        "request_key": 218, "keyctl": 219, "perf_event_open": 241, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "memfd_secret": 447,
    },
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raises OSError."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2). Raises OSError."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount and everything below it; it goes when its last user does. Raises OSError."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def set_mount_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Add MOUNT_ATTR_* to a mount, and to those below it if asked. Raises OSError."""
    request = struct.pack("=QQQQ", attributes, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_NR_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.c_char_p(request),
        ctypes.c_size_t(len(request)),
    )
    _check(result, f"mount_setattr {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Exchange the root of this mount namespace. Raises OSError."""
    machine = platform.machine()
    if machine not in _NR_PIVOT_ROOT:
        raise OSError(38, f"pivot_root: not known for {machine}")
    result = _libc.syscall(
        ctypes.c_long(_NR_PIVOT_ROOT[machine]),
        ctypes.c_char_p(new_root.encode()),
        ctypes.c_char_p(put_old.encode()),
    )
    _check(result, "pivot_root")


def _prctl(option: int, value: int, pointer: ctypes.c_void_p | None = None) -> None:
    _check(
        _libc.prctl(
            ctypes.c_int(option),
            ctypes.c_ulong(value),
            pointer or ctypes.c_ulong(0),
            ctypes.c_ulong(0),
            ctypes.c_ulong(0),
        ),
        f"prctl {option}",
    )


def set_dumpable() -> None:
    """Let this process own its /proc files again after a change of user. Raises OSError."""
    _prctl(_PR_SET_DUMPABLE, 1)


def die_with_parent() -> None:
    """Be killed when the parent ends. A later change of user undoes it. Raises OSError."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Make set-user-id bits and file capabilities powerless from here on. Raises OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_system_calls() -> None:
    """Refuse the calls in _DENIED (and foreign call tables) for this process and its children.

    On an architecture without a table this does nothing. `forbid_new_privileges` comes first.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    machine = platform.machine()
    if machine not in _DENIED:
        return
    load, jump_equal, jump_at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse_eperm, refuse_enosys = 0x7FFF0000, 0x00050001, 0x00050026
    numbers = sorted(_DENIED[machine].values())
    # The offset of `arch` in struct seccomp_data is 4, that of `nr` is 0.
    program = [
        (load, 0, 0, 4),
        (jump_equal, 1, 0, _AUDIT_ARCH[machine]),
        (give, 0, 0, refuse_enosys),
        (load, 0, 0, 0),
        (jump_at_least, 0, 1, _X32_BIT),
        (give, 0, 0, refuse_enosys),
    ]
    for index, number in enumerate(numbers):
        program.append((jump_equal, len(numbers) - index, 0, number))
    program.append((give, 0, 0, allow))
    program.append((give, 0, 0, refuse_eperm))
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.cast(header, ctypes.c_void_p))
