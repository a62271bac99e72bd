"""Shared memory is given back, also by a process that is killed."""

import subprocess
import sys
import time
import uuid

from headrace.model.shared_folder import own_folder, shared_folder

_HOLDER = """
import sys
from headrace.model.shared_folder import own_folder
with own_folder(sys.argv[1]) as folder:
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_leaves_no_shared_memory():
    name = uuid.uuid4().hex
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        assert (shared_folder(name) / "weights").is_file()
        holder.kill()
    deadline = time.monotonic() + 30.0
    while shared_folder(name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # a process of nobody's: there is nothing to wait on
    assert not shared_folder(name).exists()


def test_the_folder_is_emptied_before_and_removed_after():
    name = uuid.uuid4().hex
    shared_folder(name).mkdir()
    (shared_folder(name) / "old").touch()
    with own_folder(name) as folder:
        assert not folder.exists()
        folder.mkdir()
    assert not folder.exists()
