"""Which machine a run's numbers come from, in words; read from /proc, without importing torch."""

import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "transformers", "tokenizers")


def describe_machine() -> dict[str, str]:
    """Label to value: processor, cores this process may use, memory, system, versions."""
    machine = {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "?"),
    }
    kilobytes = _field("/proc/meminfo", "MemTotal").removesuffix(" kB")
    if kilobytes.isdigit():
        machine["memory"] = f"{int(kilobytes) / 2**20:.1f} GiB"
    machine["system"] = f"{platform.system()} {platform.release()}"
    machine["python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            machine[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            machine[package] = "not installed"
    return machine


def _field(path: str, name: str) -> str:
    """The value of the first "name : value" line of a /proc file; "" when there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""
