"""Freed memory stays with the process that asked for it."""

import subprocess
import sys

SCRIPT = """
import resource, sys
from headrace.training.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(32 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
assert keep_freed_memory() or "glibc" not in sys.argv[1]
faults()
print(plain, faults())
"""


def test_memory_is_faulted_in_once():
    from platform import libc_ver

    name = libc_ver()[0]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    plain, kept = map(int, done.stdout.split())
    if name == "glibc":
        assert kept < plain / 10
