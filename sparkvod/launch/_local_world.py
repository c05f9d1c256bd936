"""The processes of one local world, and the loop in the calling thread that serves them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from sparkvod import config, log
from sparkvod.errors import LaunchError
from sparkvod.launch import _frames
from sparkvod.launch.context import missing_ranks
from sparkvod.launch.failure import Failure, blame, first_cause
from sparkvod.launch.launcher import EventHandler
from sparkvod.launch.output import LinePrinter

GRACE_SECONDS = 3.0
# What a rank that has returned may take for its own end: its atexit functions may have logs to upload.
EXIT_SECONDS = 30.0
_KILL_SECONDS = 10.0
# A rank that only noticed a lost peer may be heard before the cause: wait this long for it.
_CAUSE_SECONDS = 1.0
_TICK_SECONDS = 0.05
_TAIL_LINES = 30

# -c rather than -m: nothing of the caller's directory is imported before the caller's own sys.path is in place.
_BOOTSTRAP = (
    "import sys; sys.path[0] = sys.argv[3]; from sparkvod.launch._local_worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)
_ROOT = str(Path(__file__).resolve().parents[2])


class _Worker:
    """One rank as its launcher sees it: the process, its socket, its two output pipes."""

    def __init__(self, rank: int, size: int, host: str, task: bytes, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.sock, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C in a terminal reaches the launcher only, which ends the ranks; and a signal
            # to the group ends what a rank started.
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOTSTRAP, str(theirs.fileno()), str(os.getpid()), _ROOT],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        self.sock.setblocking(False)
        header = json.dumps({"rank": rank, "size": size, "host": host, "path": [p or os.getcwd() for p in sys.path]})
        self.outgoing = deque(
            [
                memoryview(_frames.pack(_frames.TASK, header.encode())),
                memoryview(_frames.HEAD.pack(_frames.TASK, len(task))),
                memoryview(task),
            ]
        )
        self.frames = _frames.Splitter()
        self.partial = {"stdout": b"", "stderr": b""}
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.hung_up = False
        self.gather: bytes | None = None
        self.gather_seconds = self.gather_until = 0.0
        self.result: bytes | None = None
        self.failure: Failure | None = None

    @property
    def pipes(self) -> dict[str, IO[bytes]]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return {"stdout": self.process.stdout, "stderr": self.process.stderr}

    @property
    def ended(self) -> bool:
        return self.result is not None or self.failure is not None

    def poll(self) -> int | None:
        """Returns the exit code once the process has ended; then nothing that it started runs any more."""
        if self.process.returncode is None:
            # Looked at without reaping, so that its number still is its group's and nobody else's.
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self.signal_group(signal.SIGKILL)
            self.process.wait()
        return self.process.returncode

    def close(self) -> None:
        """Kills what still runs, and closes the socket and the pipes."""
        self.signal_group(signal.SIGKILL)
        try:
            self.process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:  # it is in a call of the system that cannot be interrupted
            log.get("launch").warning(
                "rank %d (process %d) did not end within %g s of SIGKILL", self.rank, self.process.pid, _KILL_SECONDS
            )
        self.sock.close()
        for pipe in self.pipes.values():
            pipe.close()

    def signal_group(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class LocalWorld:
    """All ranks of one run, and the loop that serves them; a context manager that leaves no process behind.

    Args:
        size: number of ranks.
        task: the pickled call that every rank makes.
        env: environment variables on top of this process's; None removes one.
        printer: prints the ranks' lines.
        on_event: gets the ranks' events.
    """

    def __init__(
        self,
        size: int,
        task: bytes,
        env: Mapping[str, str | None],
        printer: LinePrinter,
        on_event: EventHandler | None,
    ) -> None:
        self._size, self._task, self._env = size, task, env
        self._printer, self._on_event = printer, on_event
        self._host = socket.gethostname()
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []

    def __enter__(self) -> LocalWorld:
        environment = config.environment()
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self._size)))
        for name, value in self._env.items():
            environment.pop(name, None) if value is None else environment.__setitem__(name, str(value))
        try:
            for rank in range(self._size):
                worker = _Worker(rank, self._size, self._host, self._task, environment)
                self._workers.append(worker)
                self._selector.register(worker.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, (worker, ""))
                for name, pipe in worker.pipes.items():
                    os.set_blocking(pipe.fileno(), False)
                    self._selector.register(pipe, selectors.EVENT_READ, (worker, name))
        except OSError as e:
            self.__exit__()
            raise LaunchError(f"process {len(self._workers)} of {self._size} could not be started: {e}") from e
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._end_all()
        finally:  # a second Ctrl-C ends the waiting, not the cleaning
            self._selector.close()
            for worker in self._workers:
                worker.close()

    def run(self, timeout: float | None) -> list[Any]:
        """Serves the ranks until all have a result, one has failed, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not all(w.result is not None for w in self._workers):
            self._step(_TICK_SECONDS)
            self._notice_lost()
            self._end_late_gather()
            if any(w.failure for w in self._workers):
                raise self._cause().error()
            if deadline is not None and time.monotonic() > deadline:
                late = ",".join(str(w.rank) for w in self._workers if w.result is None)
                raise LaunchError(
                    f"ranks {late} of {self._size} had not ended after {timeout:g} s and were ended; "
                    "give a longer timeout, or look at what they wait for"
                )
        self._await_exits()
        return [pickle.loads(w.result or b"") for w in self._workers]

    def _cause(self) -> Failure:
        """Returns the first cause, after a moment in which a better one than a noticed lost peer may be heard."""
        until = time.monotonic() + _CAUSE_SECONDS
        while True:
            failures = [w.failure for w in self._workers if w.failure]
            waiting = [w for w in self._workers if not w.ended]
            if first_cause(failures).severity == 0 or not waiting or time.monotonic() > until:
                return blame(failures)
            self._step(_TICK_SECONDS)
            self._notice_lost()

    def _step(self, seconds: float) -> None:
        for key, mask in self._selector.select(seconds):
            worker, stream = key.data
            if stream:
                self._read_output(worker, stream)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._write(worker)
                if mask & selectors.EVENT_READ:
                    self._read_frames(worker)

    def _write(self, worker: _Worker) -> None:
        try:
            while worker.outgoing:
                sent = worker.sock.send(worker.outgoing[0])
                if sent == len(worker.outgoing[0]):
                    worker.outgoing.popleft()
                else:
                    worker.outgoing[0] = worker.outgoing[0][sent:]
        except BlockingIOError:
            return
        except OSError:  # it has gone: its exit code will tell
            worker.outgoing.clear()
        self._selector.modify(worker.sock, selectors.EVENT_READ, (worker, ""))

    def _send(self, worker: _Worker, kind: int, payload: bytes) -> None:
        if worker.hung_up:
            return
        worker.outgoing.append(memoryview(_frames.pack(kind, payload)))
        self._selector.modify(worker.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, (worker, ""))

    def _read_frames(self, worker: _Worker) -> None:
        try:
            chunk = worker.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            worker.hung_up = True  # its end is near, but its exit code may take a moment more
            self._selector.unregister(worker.sock)
            return
        for kind, payload in worker.frames.feed(chunk):
            if kind == _frames.GATHER:
                (worker.gather_seconds,) = _frames.SECONDS.unpack_from(payload)
                worker.gather_until = time.monotonic() + worker.gather_seconds
                worker.gather = payload[_frames.SECONDS.size :]
            elif kind == _frames.RESULT:
                worker.result = payload
            elif kind == _frames.FAILURE:
                worker.failure = Failure.from_json(payload.decode(), trusted=True)
            elif kind == _frames.EVENT and self._on_event is not None:
                self._tell({**json.loads(payload), "rank": worker.rank})
        self._relay_gather()

    def _relay_gather(self) -> None:
        waiting = [w for w in self._workers if w.gather is not None]
        gone = [w.rank for w in self._workers if w.result is not None and w.gather is None]
        if len(waiting) == self._size:
            everybody = _frames.pack_list([w.gather or b"" for w in self._workers])
            for worker in waiting:
                worker.gather = None
                self._send(worker, _frames.GATHERED, everybody)
        elif waiting and gone:
            for worker in waiting:
                worker.gather = None
                self._send(
                    worker,
                    _frames.GATHER_FAILED,
                    f"rank {gone[0]} on {self._host} has returned without this all-gather; call init() equally often "
                    "on every rank".encode(),
                )

    def _end_late_gather(self) -> None:
        """Fails the all-gather that some ranks wait in, once the first of them has waited its whole time."""
        waiting = [w for w in self._workers if w.gather is not None]
        late = [w for w in waiting if time.monotonic() > w.gather_until]
        if late:
            missing = [w.rank for w in self._workers if w.gather is None]
            text = missing_ranks(missing, self._size, self._host, late[0].gather_seconds)
            for worker in waiting:
                worker.gather = None
                self._send(worker, _frames.GATHER_LATE, text.encode())

    def _tell(self, event: dict[str, Any]) -> None:
        try:
            if self._on_event is not None:
                self._on_event(event)
        except Exception:
            log.get("launch").exception("on_event failed; it is not called again")
            self._on_event = None

    def _read_output(self, worker: _Worker, stream: str) -> None:
        pipe = worker.pipes[stream]
        try:
            chunk = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(pipe)
        text = worker.partial[stream] + (chunk or b"\n" * bool(worker.partial[stream]))
        *lines, worker.partial[stream] = text.split(b"\n")
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip("\r").rsplit("\r", 1)[-1]
            worker.tail.append(line)
            try:
                self._printer(worker.rank, stream, line)
            except (OSError, ValueError) as e:  # a closed or broken stream of the caller's must not end the ranks
                log.get("launch").debug("a line of rank %d could not be printed: %s", worker.rank, e)

    def _notice_lost(self) -> None:
        for worker in self._workers:
            if worker.ended or worker.poll() is None:
                continue
            self._drain(worker)
            if not worker.ended:
                how = _how(worker.process.returncode)
                worker.failure = Failure.lost(worker.rank, self._host, how, "\n".join(worker.tail))

    def _drain(self, worker: _Worker) -> None:
        """Takes what an ended process has left in its socket and pipes, without waiting for who else holds them."""
        open_keys = [k for k in list(self._selector.get_map().values()) if k.data[0] is worker]
        for key in open_keys:
            for _ in range(1024):
                before = len(self._selector.get_map())
                if not self._readable(key.fileobj):
                    break
                self._read_output(worker, key.data[1]) if key.data[1] else self._read_frames(worker)
                if len(self._selector.get_map()) < before:
                    break

    @staticmethod
    def _readable(source: Any) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _await_exits(self) -> None:
        """Gives ranks that have returned the time for their own ends (atexit, threads), and prints what they say."""
        until = time.monotonic() + EXIT_SECONDS
        while any(w.poll() is None for w in self._workers) and time.monotonic() < until:
            self._step(_TICK_SECONDS)
        for worker in self._workers:
            self._drain(worker)
            code = worker.process.returncode
            if code:
                how = _how(code)
                log.get("launch").warning("rank %d had returned its result, then its process %s", worker.rank, how)
            elif code is None:
                log.get("launch").warning(
                    "rank %d had returned its result, but its process did not end within %g s and is ended; a thread "
                    "that is no daemon, or an atexit function, kept it",
                    worker.rank,
                    EXIT_SECONDS,
                )

    def _end_all(self) -> None:
        """Ends every process: asks, waits for a grace, kills; what they print meanwhile is still read."""
        running = [w for w in self._workers if w.poll() is None]
        for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for worker in running:
                worker.signal_group(number)
            until = time.monotonic() + seconds
            while any(w.poll() is None for w in running) and time.monotonic() < until:
                self._step(0.01)
        for worker in self._workers:
            self._drain(worker)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    except ValueError:
        return f"was killed by signal {-code}"
