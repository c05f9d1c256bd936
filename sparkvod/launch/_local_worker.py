"""What runs in a process that the local launcher started: one function, as one rank."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from sparkvod import config
from sparkvod.errors import CollectiveTimeoutError, PeerLostError
from sparkvod.launch import _frames


class _Line:
    """The worker's end of the socket to its launcher. Sending is safe from any thread, receiving is the main one's.

    It is the rank's alone: two processes that wrote to it would cut each other's frames.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock, self._pid = sock, threading.Lock(), os.getpid()

    def send(self, kind: int, payload: bytes) -> None:
        with self._lock:
            self._sock.sendall(_frames.HEAD.pack(kind, len(payload)))
            self._sock.sendall(payload)

    def receive(self) -> tuple[int, bytes]:
        kind, length = _frames.HEAD.unpack(self._take(_frames.HEAD.size))
        return kind, self._take(length)

    def allgather(self, data: bytes) -> list[bytes]:
        # The launcher's loop keeps the deadline and always answers: it knows which ranks are missing.
        self.send(_frames.GATHER, _frames.SECONDS.pack(config.get("start_timeout")) + data)
        kind, payload = self.receive()
        if kind == _frames.GATHER_LATE:
            raise CollectiveTimeoutError(payload.decode())
        if kind == _frames.GATHER_FAILED:
            raise PeerLostError(payload.decode())
        return _frames.unpack_list(payload)

    def post(self, kind: str, **fields: Any) -> None:
        if os.getpid() != self._pid:
            return
        self.send(_frames.EVENT, json.dumps({"kind": kind, "time": time.time(), **fields}, default=str).encode())

    def _take(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._sock.recv_into(view, min(len(view), 1 << 24))
            if not got:
                os._exit(1)  # the launcher has gone: nobody waits for this rank
            view = view[got:]
        return bytes(data)


def end_with_parent(parent: int) -> None:
    """Makes this process end when its launcher does, however that ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Runs the task that comes over the inherited socket, and sends back what became of it."""
    end_with_parent(parent)
    os.set_inheritable(descriptor, False)
    line = _Line(socket.socket(fileno=descriptor))
    _, header = line.receive()
    task: dict[str, Any] = json.loads(header)
    sys.path[:] = task["path"]
    _, function = line.receive()
    kind, payload = _run(line, task, function)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    line.send(kind, payload)
    _leave()


def _leave() -> NoReturn:
    """Ends this process as a script's end would, but for the taking apart of its modules.

    Threads are joined, atexit functions run, streams are flushed. What the interpreter does after that has nothing to
    give to anybody, and takes PyTorch 0.3 s of an idle core and seconds of a busy one, while the caller waits.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _run(line: _Line, task: dict[str, Any], function: bytes) -> tuple[int, bytes]:
    from sparkvod.launch import context
    from sparkvod.launch._call import call
    from sparkvod.launch._pickle import dump_result
    from sparkvod.launch.failure import Failure
    from sparkvod.observe import mailbox

    rank, size, host = int(task["rank"]), int(task["size"]), str(task["host"])
    try:
        with mailbox.use(line), context.use(context.WorldContext(rank, size, context.only_here(line.allgather))):
            fn, args, kwargs = pickle.loads(function)
            result = call(fn, args, kwargs)
        return _frames.RESULT, dump_result(result, rank)
    except BaseException as e:  # SystemExit and KeyboardInterrupt too: the caller must learn that there is no result
        return _frames.FAILURE, Failure.capture(e, rank, host).to_json().encode()
