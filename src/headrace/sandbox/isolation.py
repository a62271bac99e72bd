"""How a sandbox server locks itself in before it serves anyone.

The server gives up root, moves into its own user, pid, mount, IPC and network namespaces and
exchanges the root of its file tree for a small one in memory: `/base` is what commands will see as
`/` (read-only system directories, a few device nodes, a made-up /etc), `/boxes` holds one
size-limited tmpfs per sandbox. The host's other files and processes are out of reach from then on,
also for the server, and the kernel removes everything when the server ends, however it ends.
"""

import math
import os
import select
import shutil
import signal
import stat

from headrace.sandbox import kernel
from headrace.sandbox.types import Limits

SANDBOX_UID = 1000
"""User and group of commands, as they see themselves."""
BASE = "/base"
BOXES = "/boxes"
ROOT = "root"
"""Folder of a sandbox that is its ready-made file tree, for launchers that want one."""
LIMITS_FILE = "/etc/limits.sh"
"""Read by bash before each command (BASH_ENV): a builtin sets limits, which costs no process."""
UNPRIVILEGED_UID = 65534
"""User and group that a server started by root becomes."""
OPEN_FILES = 256
"""Open files per process. Not one of Limits: no honest command comes near it."""

_PARENT_CHECK_MS = 1000
_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FROM_HOST = ("alternatives", "ld.so.cache", "localtime")
_ETC_OWN = {
    "passwd": f"agent:x:{SANDBOX_UID}:{SANDBOX_UID}:agent:/work:/bin/bash\n",
    "group": f"agent:x:{SANDBOX_UID}:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEV_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": "/tmp",
}
_SWITCHES = {
    "user/max_user_namespaces": ("0", "user.max_user_namespaces=10000"),
    "kernel/unprivileged_userns_clone": ("0", "kernel.unprivileged_userns_clone=1"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
_READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV


class IsolationError(Exception):
    """A step failed; the message says which and, where known, the remedy."""


def limits_script(limits: Limits, *, own_processes: int | None, folder: str = "") -> str:
    """Bash text that applies `limits` to the shell that reads it and to its children.

    Args:
        limits: see Limits.
        own_processes: how many processes in the command's user namespace are not the command's.
            The kernel counts per such namespace (Linux 5.14); None for a command without one,
            whose processes cannot be limited.
        folder: a variable's name whose value to change directory to, or empty.
    """
    cpu = max(1, math.ceil(limits.cpu_s))
    hard = f"ulimit -H -c 0 -n {OPEN_FILES} -v {limits.memory_mb * 1024} -f {limits.disk_mb * 1024}"
    # One second between SIGXCPU and SIGKILL tells a CPU limit from any other kill.
    hard += f" -t {cpu + 1}"
    if own_processes is not None:
        hard += f" -u {limits.processes + own_processes}"
    soft = hard.replace("-H", "-S").replace(f"-t {cpu + 1}", f"-t {cpu}")
    lines = [f"{soft} && {hard} || exit 126", "unset BASH_ENV"]
    if folder:
        lines.append(f'cd "${folder}" || exit 126')
    return "\n".join(lines) + "\n"


def drop_root() -> bool:
    """Become an unprivileged user if this is root; root escapes limits and reads host files.

    Returns:
        Whether this process is unprivileged now.
    """
    if os.geteuid() != 0:
        return True
    try:
        os.setgroups([])
        os.setresgid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        os.setresuid(UNPRIVILEGED_UID, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    except OSError:
        return _root_is_mapped()
    kernel.set_dumpable()
    return True


def _root_is_mapped() -> bool:
    """Whether root here is an ordinary user outside, as in a rootless container."""
    try:
        with open("/proc/self/uid_map") as file:
            inside, outside, _ = file.readline().split()
    except (OSError, ValueError):
        return False
    return inside == "0" and outside != "0"


def require_kernel(release: str) -> None:
    """Check that the kernel counts processes per user namespace and has mount_setattr.

    Raises:
        IsolationError: Linux older than 5.14.
    """
    numbers = release.split("-")[0].split(".")
    try:
        version = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        return  # An unreadable version proves nothing; the steps below will tell.
    if version < (5, 14):
        raise IsolationError(f"Linux {release} is too old; 5.14 or newer is needed")


def lock_in(limits_text: str, parent_pid: int) -> None:
    """Leave the host: new namespaces, new root. Everything needed must be imported before.

    Returns in a child, which is the first process of the new pid namespace: when it ends, the
    kernel kills all others there. The calling process stays behind as its keeper and never returns.

    Args:
        limits_text: see limits_script; written where commands will read it.
        parent_pid: the process whose end ends everything.

    Raises:
        IsolationError: the kernel or the container around refuses a step.
    """
    require_kernel(os.uname().release)
    if not drop_root():
        raise IsolationError("this root user may not become an unprivileged one (CAP_SETUID)")
    uid, gid = os.getuid(), os.getgid()
    try:
        kernel.unshare(
            kernel.CLONE_NEWUSER
            | kernel.CLONE_NEWNS
            | kernel.CLONE_NEWPID
            | kernel.CLONE_NEWIPC
            | kernel.CLONE_NEWNET
        )
    except OSError as error:
        raise IsolationError(f"{error.strerror}; {user_namespace_remedy()}") from error
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{SANDBOX_UID} {uid} 1")
        _write("/proc/self/gid_map", f"{SANDBOX_UID} {gid} 1")
        _move_into_pid_namespace(parent_pid)
        _build_root(limits_text)
    except OSError as error:
        raise IsolationError(
            f"{error.strerror} ({error.filename or 'kernel call'}); {user_namespace_remedy()}"
        ) from error
    kernel.forbid_new_privileges()
    kernel.filter_system_calls()


def _move_into_pid_namespace(parent_pid: int) -> None:
    """Fork; go on in the child. The keeper waits for it, or kills it when `parent_pid` is gone."""
    told_end, tell_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell_end)
        kernel.die_with_parent()
        # The keeper speaks after this point of no return: if it died before, reading tells.
        alive = os.read(told_end, 1)
        os.close(told_end)
        if not alive:
            os._exit(1)
        return
    try:
        os.write(tell_end, b"x")
        # What is open belongs to the child now; the socket above all, whose end must be seen.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        poller = select.poll()
        poller.register(os.pidfd_open(child), select.POLLIN)
        # A process that the provider forked may hold the socket open after the provider's death.
        while not poller.poll(_PARENT_CHECK_MS):
            if os.getppid() != parent_pid:
                os.kill(child, signal.SIGKILL)
                break
        os.waitpid(child, 0)
    finally:
        os._exit(0)  # Takes the child along, see die_with_parent.


def user_namespace_remedy(proc: str = "/proc") -> str:
    """What a person can do when user namespaces are refused, judged by this machine's switches."""
    for switch, (bad, remedy) in _SWITCHES.items():
        try:
            with open(f"{proc}/sys/{switch}") as file:
                if file.read().strip() == bad:
                    return f"run: sysctl -w {remedy}"
        except OSError:
            continue
    return (
        "user namespaces are refused here: in a container, allow them "
        "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
    )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, "")
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def _build_root(limits_text: str) -> None:
    """Make the small root under /tmp, then exchange roots."""
    root = "/tmp"
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # The host's folders stay reachable at their paths while /tmp becomes the new root.
    kernel.mount("headrace", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=16m,mode=755")
    base = root + BASE
    for path in (base, root + BOXES, root + "/tmp", root + "/old"):
        os.mkdir(path)
    # The base is a mount of its own, so that it can become read-only while /boxes does not.
    kernel.mount(base, base, None, kernel.MS_BIND)
    os.mkdir(root + "/proc")
    kernel.mount(
        "proc",
        root + "/proc",
        "proc",
        kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC,
    )
    _bind("/usr", base + "/usr")
    kernel.set_mount_attributes(base + "/usr", _READ_ONLY, recursive=True)
    os.symlink("base/usr", root + "/usr")
    os.symlink("base/etc", root + "/etc")
    for name in _TOP_LEVEL:
        host = "/" + name
        if os.path.islink(host):
            os.symlink(os.readlink(host).lstrip("/"), f"{base}/{name}")
        elif os.path.isdir(host):
            _bind(host, f"{base}/{name}")
            kernel.set_mount_attributes(f"{base}/{name}", _READ_ONLY, recursive=True)
        else:
            continue
        os.symlink(f"base/{name}", f"{root}/{name}")
    _build_etc(base + "/etc", limits_text)
    _build_dev(base + "/dev")
    for name in ("work", "tmp", "proc", "run", "var"):
        os.mkdir(f"{base}/{name}")
    os.symlink("/tmp", base + "/var/tmp")
    kernel.set_mount_attributes(base, _READ_ONLY, recursive=False)
    kernel.pivot_root(root, root + "/old")
    os.chdir("/")
    kernel.unmount("/old")
    os.rmdir("/old")


def _build_etc(etc: str, limits_text: str) -> None:
    os.mkdir(etc)
    for name, text in _ETC_OWN.items():
        _write(f"{etc}/{name}", text)
    _write(f"{etc}/{os.path.basename(LIMITS_FILE)}", limits_text)
    for name in _ETC_FROM_HOST:
        host = os.path.realpath(f"/etc/{name}")
        if os.path.exists(host) and not host.startswith("/usr/"):
            _bind(host, f"{etc}/{name}")
            kernel.set_mount_attributes(f"{etc}/{name}", _READ_ONLY, recursive=True)
        elif host.startswith("/usr/"):
            os.symlink(host, f"{etc}/{name}")


def _build_dev(dev: str) -> None:
    os.mkdir(dev)
    for name in _DEVICES:
        if stat.S_ISCHR(os.stat(f"/dev/{name}").st_mode):
            _bind(f"/dev/{name}", f"{dev}/{name}")
    for name, target in _DEV_LINKS.items():
        os.symlink(target, f"{dev}/{name}")


def box_folder(number: int, workshop: str) -> str:
    """Where sandbox `number` lives: below /boxes, or below `workshop` for kind "none"."""
    return f"{workshop or BOXES}/{number}"


def make_box(folder: str, limits: Limits, *, isolated: bool, own_root: bool) -> None:
    """A fresh, empty `folder`/work and `folder`/tmp, on a tmpfs of limited size when isolated.

    Args:
        folder: must not exist.
        limits: disk_mb and files apply.
        isolated: mount a tmpfs there.
        own_root: also make `folder`/root, the base with these two bound to /work and /tmp.

    Raises:
        OSError: the kernel refuses.
    """
    os.mkdir(folder, 0o700)
    if isolated:
        kernel.mount(
            "headrace",
            folder,
            "tmpfs",
            kernel.MS_NOSUID | kernel.MS_NODEV,
            # The tmpfs root and the folders made below are not the command's.
            f"size={limits.disk_mb}m,nr_inodes={limits.files + 4},mode=755",
        )
    os.mkdir(f"{folder}/work", 0o755)
    os.mkdir(f"{folder}/tmp")
    os.chmod(f"{folder}/tmp", 0o1777)
    os.mkdir(f"{folder}/{ROOT}")
    if own_root:
        _bind(BASE, f"{folder}/{ROOT}")
        _bind(f"{folder}/work", f"{folder}/{ROOT}/work")
        _bind(f"{folder}/tmp", f"{folder}/{ROOT}/tmp")


def remove_box(folder: str, *, isolated: bool) -> None:
    """Undo `make_box`. Nothing may run in it any more.

    Raises:
        OSError: the kernel refuses.
    """
    if isolated:
        kernel.unmount(folder)
        os.rmdir(folder)
    else:
        # Folders without permissions would stop the removal; their owner can restore them.
        for path, folders, _ in os.walk(folder):
            for name in folders:
                if not os.path.islink(f"{path}/{name}"):
                    os.chmod(f"{path}/{name}", 0o700)
        shutil.rmtree(folder)
