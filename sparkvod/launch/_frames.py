"""Length-prefixed frames on the socket between the local launcher and one of its workers.

A frame is a kind (u8), a length (u64) and that many bytes. The socket is a pair inherited by the worker: nobody else
can reach it, so what comes over it may be unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

HEAD = struct.Struct("!BQ")
#: What a gather's payload begins with: the seconds within which it must end.
SECONDS = struct.Struct("!d")

# launcher -> worker
TASK, GATHERED, GATHER_FAILED, GATHER_LATE = 1, 2, 3, 4
# worker -> launcher
GATHER, RESULT, FAILURE, EVENT = 11, 12, 13, 14


def pack(kind: int, payload: bytes) -> bytes:
    """Returns one frame."""
    return HEAD.pack(kind, len(payload)) + payload


def pack_list(parts: Sequence[bytes]) -> bytes:
    """Returns byte strings as one."""
    return b"".join(struct.pack("!Q", len(part)) + part for part in parts)


def unpack_list(data: bytes) -> list[bytes]:
    """Returns what :func:`pack_list` took."""
    parts, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("!Q", data, at)
        parts.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return parts


class Splitter:
    """Cuts a stream of bytes that comes in pieces into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Takes the next bytes; yields (kind, payload) of each frame that is now complete."""
        self._buffer += chunk
        while len(self._buffer) >= HEAD.size:
            kind, length = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + length:
                return
            payload = bytes(memoryview(self._buffer)[HEAD.size : HEAD.size + length])
            del self._buffer[: HEAD.size + length]
            yield kind, payload
