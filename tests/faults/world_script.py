"""A rank that sums until a fault befalls one of the ranks, and notes what it hears: ``world_script.py FOLDER HOW``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from sparkvod.core import basics
from sparkvod.core.handles import Pending
from sparkvod.errors import HorovodInternalError

FAULTY = 1
COUNT = 100_000  # floats of each sum


def allreduce(name: str, count: int = COUNT) -> float:
    """Sums ones; returns the last element."""
    engine = basics.engine()
    memory = engine.allocate(4 * count)
    view = memoryview(memory).cast("f")
    view[-1] = 1.0
    Pending(engine, engine.allreduce(name, memory.address, memory.address, count, 8, 1), None, memory).wait()
    return view[-1]


def sockets() -> set[int]:
    """Returns the descriptors of this process that are sockets."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                found.add(int(number))
    return found


def befall(how: str, ours: set[int]) -> None:
    """Does ``how`` to this process; ``ours``: the engine's sockets."""
    if how == "raise":
        raise ArithmeticError("raised by the test")
    if how == "exit":
        os._exit(3)
    if how in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    for number in ours:
        with socket.socket(fileno=os.dup(number)) as sock, contextlib.suppress(OSError):
            if how == "close":
                sock.shutdown(socket.SHUT_RDWR)
            else:
                sock.send(os.urandom(5000), socket.MSG_DONTWAIT)


def suffer(folder: Path, how: str) -> None:
    """Sums until the fault ends the world; notes when this rank heard of it, and what."""
    before = sockets()
    basics.init()
    ours = sockets() - before
    assert ours
    try:
        for step in range(1 << 30):
            assert allreduce("step") == basics.size()
            if step == 20 and basics.rank() == FAULTY:
                (folder / "fault").write_text(repr(time.monotonic()))
                befall(how, ours)
    except HorovodInternalError as error:
        note = {"time": time.monotonic(), "kind": type(error).__name__, "message": str(error)}
        (folder / f"heard-{basics.rank()}").write_text(json.dumps(note))
    begun = time.monotonic()
    basics.shutdown()
    assert time.monotonic() - begun < 1


if __name__ == "__main__":
    suffer(Path(sys.argv[1]), sys.argv[2])
