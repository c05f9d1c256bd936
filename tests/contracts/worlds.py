"""Runs checks inside a world of ranks: one world for many checks, because starting processes and frameworks is slow.

A check is a function that every rank calls with the same arguments; it asserts. A check that fails ends its world,
and the checks behind it run in a fresh one, so that each check's outcome is its own.

The ranks' processes outlive the suite: the next one with as many ranks runs in them, in a world of the engine of its
own. :func:`close_worlds`, which the ``conftest.py`` of a room calls, ends them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

import sparkvod
from sparkvod import config

Check = Callable[..., None]
_MARK = "the check that failed: "
_START_SECONDS = 60.0


class RanksFailedError(AssertionError):
    """A function failed on a rank; the message has each failed rank's traceback, the first one's last."""


class _World:
    """Processes, one per rank, that run what they are sent until they are closed.

    Args:
        size: number of ranks.
        env: the environment variables that a process must have from its start.
    """

    def __init__(self, size: int, env: dict[str, str]) -> None:
        self._size, self._env, self._said = size, env, ""
        self._ranks: list[Connection] = []
        self._pids: list[int] = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "ranks")
            listener.bind(address)
            listener.listen(size)
            listener.settimeout(_START_SECONDS)
            self._thread = threading.Thread(target=self._hold, args=(address,), daemon=True)
            self._thread.start()
            try:
                met = sorted((self._meet(listener) for _ in range(size)), key=lambda found: found[0])
            except OSError:
                self._thread.join(1)
                raise RanksFailedError(f"the ranks did not start: {self._said}") from None
        self._pids, self._ranks = [pid for _, pid, _ in met], [rank for _, _, rank in met]

    def run(self, fn: Callable[..., Any], args: Sequence[Any], env: dict[str, str], timeout: float) -> list[Any]:
        """Returns what ``fn(*args)`` returned, by rank; the world can be used again, unless this raises."""
        task = cloudpickle.dumps((fn, args, env))
        for rank in self._ranks:
            rank.send_bytes(task)
        results: dict[int, Any] = {}
        failed: list[str] = []
        deadline = time.monotonic() + timeout
        left = list(self._ranks)
        while left:
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                failed.append(f"{len(left)} of {self._size} ranks had not ended")
                break
            for rank in ready:
                left.remove(rank)  # type: ignore[arg-type]
                number = self._ranks.index(rank)  # type: ignore[arg-type]
                try:
                    good, results[number] = rank.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    good = False
                if not good:
                    failed.append(f"rank {number}: {results.get(number, 'its process ended')}")
                    deadline = min(deadline, time.monotonic() + 10)
        if failed:
            self.close()
            said = [] if len(results) == self._size else [self._said]
            raise RanksFailedError("\n".join(said + failed[::-1]))
        return [results[number] for number in range(self._size)]

    def close(self) -> None:
        """Ends the processes, however busy they are."""
        for rank in self._ranks:
            rank.close()
        self._thread.join(3)
        if self._thread.is_alive():
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join(10)

    def _hold(self, address: str) -> None:
        try:
            sparkvod.run_local(_serve, (address,), np=self._size, env=self._env, verbose=0)
        except Exception as error:
            self._said = str(error)

    @staticmethod
    def _meet(listener: socket.socket) -> tuple[int, int, Connection]:
        rank = Connection(listener.accept()[0].detach())
        number, pid = rank.recv()
        return number, pid, rank


def _serve(address: str) -> None:
    """What a rank does: it runs what comes until nothing comes any more, or something failed."""
    from sparkvod.core import basics
    from sparkvod.launch import context

    world = context.current()
    assert world is not None
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        driver = Connection(sock.detach())
    driver.send((world.rank, os.getpid()))
    while True:
        try:
            fn, args, env = pickle.loads(driver.recv_bytes())
        except EOFError:
            return
        before = config.environment()
        config.set_environment(env)
        try:
            result = fn(*args)
            basics.shutdown()
        except BaseException:
            driver.send((False, traceback.format_exc()))
            raise
        os.environ.clear()  # what the function has set goes too
        os.environ.update(before)
        driver.send((True, result))


_worlds: dict[tuple[int, frozenset[tuple[str, str]]], _World] = {}


def run_in_world(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    size: int = 2,
    env: dict[str, str] | None = None,
    timeout: float = 60,
) -> list[Any]:
    """Returns what ``fn(*args)`` returned in the processes of a world of ``size`` ranks, which others used before.

    Args:
        fn: what each rank calls; it makes the ranks a world (``init``), which is shut down behind it.
        args: its arguments.
        size: number of ranks.
        env: environment variables. Our knobs are set for this call; with others, processes of their own are started.
        timeout: seconds.

    Raises:
        RanksFailedError: it failed on a rank, or the seconds passed.
    """
    # The tensors are small, and the ranks may be more than the cores.
    given = {"OMP_NUM_THREADS": "1", **(env or {})}
    knobs = {name: value for name, value in given.items() if name.startswith("SPARKVOD_")}
    fixed = {name: value for name, value in given.items() if name not in knobs}
    key = (size, frozenset(fixed.items()))
    for other in [other for other in _worlds if other[1] != key[1]]:
        _worlds.pop(other).close()  # the processes of another framework, which are large
    if key not in _worlds:
        _worlds[key] = _World(size, fixed)
    try:
        return _worlds[key].run(fn, args, knobs, timeout)
    except BaseException:
        _worlds.pop(key).close()
        raise


def close_worlds() -> None:
    """Ends all processes that stay for later suites."""
    while _worlds:
        _worlds.popitem()[1].close()


class Suite:
    """Checks, and their outcomes by number of ranks.

    Args:
        checks: the functions; their names must differ.
        args: what each is called with.
        setup: called first in each world, with the same arguments.
        env: environment variables of the ranks.
        timeout: seconds for all checks together, per world.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        args: Sequence[Any] = (),
        setup: Check | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 90,
    ) -> None:
        self._checks = {check.__name__: check for check in checks}
        self._args, self._setup, self._timeout = tuple(args), setup, timeout
        self._env = env
        self._outcomes: dict[int, dict[str, str | None]] = {}

    @property
    def names(self) -> list[str]:
        """The checks' names."""
        return list(self._checks)

    def verify(self, name: str, size: int) -> None:
        """Raises ``AssertionError`` with the rank's traceback if a check fails in a world of ``size`` ranks."""
        if size not in self._outcomes:
            self._outcomes[size] = self._run(size)
        complaint = self._outcomes[size][name]
        if complaint is not None:
            raise AssertionError(complaint)

    def _run(self, size: int) -> dict[str, str | None]:
        outcomes: dict[str, str | None] = {}
        left = list(self._checks)
        while left:
            checks = [self._checks[name] for name in left]
            try:
                run_in_world(_run_in_rank, (self._setup, checks, self._args), size, self._env, self._timeout)
                failed, complaint = None, ""
            except RanksFailedError as error:
                complaint = str(error)
                at = complaint.rfind(_MARK)
                failed = complaint[at + len(_MARK) :].split()[0] if at >= 0 else left[0]
            passed = left if failed is None else left[: left.index(failed)]
            outcomes.update(dict.fromkeys(passed))
            left = left[len(passed) :]
            if failed is not None:
                outcomes[failed] = complaint
                left = left[1:]
        return outcomes


def _run_in_rank(setup: Check | None, checks: Sequence[Check], args: Sequence[Any]) -> None:
    if setup is not None:
        setup(*args)
    for check in checks:
        try:
            check(*args)
        except BaseException:
            raise AssertionError(f"{traceback.format_exc()}\n{_MARK}{check.__name__} ") from None
