"""The world that a launcher gives to the function it runs: rank, size, an all-gather of bytes, the job's secret.

This is all that :func:`sparkvod.core.init` needs to know of a launcher, and all that a launcher knows of the engine:
endpoints are opaque bytes that ``allgather`` carries. The context belongs to the process, not to a thread, because a
process is one rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sparkvod import log

ExitHook = Callable[[BaseException | None], None]


@dataclass(frozen=True)
class WorldContext:
    """One rank's view of the world that its launcher started.

    Attributes:
        rank: rank of this process, 0 to ``size - 1``; the ranks of one host are contiguous.
        size: number of ranks.
        allgather: collective over all ranks: takes this rank's bytes, returns everybody's in rank order. It may be
            called again and again (each ``init`` does); all ranks call it equally often, from one thread.
        secret: the job's secret, None when the medium of ``allgather`` is itself trusted. Rank 0 draws random bytes for
            each world and gathers them along; they are keyed with this secret where there is one.
    """

    rank: int
    size: int
    allgather: Callable[[bytes], list[bytes]]
    secret: bytes | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} of a world of {self.size} was found, a rank from 0 to size - 1 was expected; "
                "check what started this process"
            )


def only_here(allgather: Callable[[bytes], list[bytes]]) -> Callable[[bytes], list[bytes]]:
    """Returns an all-gather that raises ``RuntimeError`` in processes forked from this one.

    They share its connection to the launcher, and would answer in its place.
    """
    mine = os.getpid()

    def checked(data: bytes) -> list[bytes]:
        if os.getpid() != mine:
            raise RuntimeError(
                f"a process forked from a rank (process {os.getpid()} of {mine}) tried an all-gather, only the rank "
                "itself may; do it, and init(), in the rank"
            )
        return allgather(data)

    return checked


def missing_ranks(missing: Sequence[int], size: int, host: str, seconds: float) -> str:
    """Returns the text of the error of ranks that waited in an all-gather for others of their host.

    Args:
        missing: the ranks that did not come; empty where the launcher cannot tell which.
        size: number of ranks.
        host: name of the host that all of them are on.
        seconds: how long the others waited.
    """
    names = f"not all of {size} ranks"
    if missing:
        names = f"ranks {','.join(map(str, missing))} of {size}" if len(missing) > 1 else f"rank {missing[0]} on {host}"
    did = "called" if not missing else "did not call"
    return (
        f"{names} {did} init() within {seconds:g} s of the first one that did; call it equally often on every rank, "
        "or raise SPARKVOD_START_TIMEOUT"
    )


_lock = threading.Lock()
_current: WorldContext | None = None
_hooks: list[ExitHook] = []


def current() -> WorldContext | None:
    """Returns the world that a launcher set for this process, None when no launcher runs it."""
    return _current


def on_exit(hook: ExitHook) -> None:
    """Registers what to run when the launched function ends; the newest runs first.

    Args:
        hook: called with the function's exception, or None when it returned. Registering the same hook again
            changes nothing. Outside a launched function the hooks are kept for the next one.
    """
    with _lock:
        if hook not in _hooks:
            _hooks.append(hook)


def remove_exit_hook(hook: ExitHook) -> None:
    """Takes back :func:`on_exit`; a hook that is not registered is no error."""
    with _lock:
        if hook in _hooks:
            _hooks.remove(hook)


def run_exit_hooks(error: BaseException | None) -> None:
    """Runs and forgets all hooks. One that raises is logged, so that it cannot hide how the function ended."""
    while True:
        with _lock:
            if not _hooks:
                return
            hook = _hooks.pop()
        try:
            hook(error)
        except Exception:
            log.get("launch").exception("a hook at the end of the worker failed")


@contextmanager
def use(context: WorldContext) -> Iterator[WorldContext]:
    """Sets the process's world for the body, and runs the exit hooks after it, with the body's exception.

    Raises:
        RuntimeError: the process already is a rank of another world.
    """
    global _current
    with _lock:
        if _current is not None:
            raise RuntimeError(
                f"this process already is rank {_current.rank} of a world of {_current.size}; "
                "a launched function cannot be a rank of a second world"
            )
        _current = context
    error: BaseException | None = None
    try:
        yield context
    except BaseException as e:
        error = e
        raise
    finally:
        try:
            run_exit_hooks(error)
        finally:
            with _lock:
                _current = None
