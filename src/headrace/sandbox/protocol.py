"""Messages between a provider and its sandbox server, and how they are framed.

A frame is a 4-byte big-endian length followed by one MessagePack value. Every request carries an
id and gets exactly one reply with that id, except `Kill`, which makes the reply of another request
come sooner. Paths travel as bytes because file names need not be valid UTF-8.
"""

import struct

import msgspec

from headrace.sandbox.types import EndReason, FileEntry, Limits

_LENGTH = struct.Struct(">I")


class ServerConfig(msgspec.Struct, frozen=True):
    """What a server needs to know at its start; sent as JSON in its argument list.

    Attributes:
        kind: "bwrap", "unshare" or "none".
        limits: bounds of every sandbox.
        parent_pid: the provider's process; the server ends when it does.
        workshop: directory for kind "none", made and removed by the provider; else empty.
    """

    kind: str
    limits: Limits
    parent_pid: int
    workshop: str = ""


class Open(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make sandbox number `sandbox`, or give it a fresh tree if it exists."""

    id: int
    sandbox: int
    files: dict[bytes, FileEntry]


class Run(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run `command` with bash for at most `wall_s` seconds."""

    id: int
    sandbox: int
    command: bytes
    wall_s: float


class Tree(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read the work folder."""

    id: int
    sandbox: int


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Kill what runs and remove the sandbox. Unknown numbers are fine."""

    id: int
    sandbox: int


class Kill(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the command of request `run_id` now. Unknown ids are fine. Has no reply of its own."""

    run_id: int


Request = Open | Run | Tree | Close | Kill


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First message of a server that can work."""


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply to Open and Close."""

    id: int


class Ran(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply to Run; the fields of CommandResult."""

    id: int
    exit_code: int
    output: bytes
    truncated: bool
    ended: EndReason
    wall_s: float


class Listing(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply to Tree."""

    id: int
    files: dict[bytes, FileEntry]


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reply to any request that could not be served; id 0 means the server cannot start."""

    id: int
    error: str


Reply = Ready | Done | Ran | Listing | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def largest_frame(limits: Limits) -> int:
    """Bytes of the largest frame either side accepts: a full disk, with room for names."""
    return (32 + 2 * limits.disk_mb) * 2**20


def frame(message: Request | Reply) -> bytes:
    """One message, ready to be written."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames.

    Raises:
        ValueError: from `feed`, when a frame is longer than `largest`.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies of all frames completed by `data`."""
        buffer = self._buffer
        buffer += data
        bodies = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self._largest:
                raise ValueError(f"sandbox frame of {length} bytes exceeds {self._largest}")
            if len(buffer) - start - _LENGTH.size < length:
                break
            start += _LENGTH.size
            bodies.append(bytes(buffer[start : start + length]))
            start += length
        del buffer[:start]
        return bodies
