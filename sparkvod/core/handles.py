"""Handles: what is left to do when a submitted collective has ended, by number."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from sparkvod._native import Engine
from sparkvod.errors import CollectiveTimeoutError, HorovodInternalError


class Pending:
    """A submitted collective.

    Args:
        engine: engine that it was submitted to.
        handle: the engine's handle.
        finish: called with this object once the engine is done, before its handle is released; its result is the
            collective's. None when ``keep`` is the result.
        keep: what must stay alive until then: the tensors whose memory the engine reads and writes.
    """

    __slots__ = ("engine", "finish", "handle", "keep")

    def __init__(self, engine: Engine, handle: int, finish: Callable[[Pending], Any] | None, keep: Any) -> None:
        self.engine, self.handle, self.finish, self.keep = engine, handle, finish, keep

    def wait(self) -> Any:
        """Waits, finishes, releases the handle and returns the result.

        Raises:
            HorovodInternalError: the collective failed.
            KeyboardInterrupt: the wait was interrupted; the collective goes on without anybody to take its result.
        """
        try:
            self.engine.wait(self.handle)
            result = self.keep if self.finish is None else self.finish(self)
        except BaseException:
            abandon(self)
            raise
        self.engine.release(self.handle)
        return result


_numbers = itertools.count()
_pending: dict[int, Pending] = {}
_abandoned: list[Pending] = []
# Reentrant, because the garbage collector may abandon something at any time.
_abandoned_lock = threading.RLock()


def abandon(pending: Pending) -> None:
    """Releases a collective whose result nobody will take; one that still runs keeps its memory until it has ended."""
    with _abandoned_lock:
        _abandoned.append(pending)
        for other in list(_abandoned):
            if other in _abandoned and other.engine.poll(other.handle):
                _abandoned.remove(other)
                other.engine.release(other.handle)


def abandon_all(owner: Any, pending: Callable[[], Iterable[Pending]]) -> None:
    """Abandons what is still on its way when an object is destroyed, so that the engine writes into no freed memory.

    Args:
        owner: the object that waits for the collectives while it lives.
        pending: returns those that it has not waited for; must not hold the owner.
    """

    def end() -> None:
        for each in pending():
            abandon(each)

    weakref.finalize(owner, end).atexit = False


def wait_for_all(pending: Iterable[Pending]) -> None:
    """Waits for collectives whose results are where they should be, or that nobody wants.

    Raises:
        HorovodInternalError: the first that failed, when all have ended.
        KeyboardInterrupt: the wait was interrupted; those that go on keep their memory until they have ended.
    """
    left = list(pending)
    error: HorovodInternalError | None = None
    try:
        while left:
            try:
                left.pop(0).wait()
            except HorovodInternalError as e:
                error = error or e
    finally:
        for each in left:
            abandon(each)
    if error is not None:
        raise error


def add(pending: Pending) -> int:
    """Takes a pending collective and returns the number that the caller holds."""
    number = next(_numbers)
    _pending[number] = pending
    return number


def _find(handle: Any) -> Pending | None:
    if not isinstance(handle, int):
        raise TypeError(
            f"a {type(handle).__name__} was found, a handle was expected: the number that one _async call returned; "
            "the other forms return their result, which need not be waited for"
        )
    return _pending.get(handle)


def poll(handle: int) -> bool:
    """Returns whether the collective has ended; True also for a handle that was already synchronised."""
    pending = _find(handle)
    return pending is None or pending.engine.poll(pending.handle)


def synchronize(handle: int, timeout: float | None = None) -> Any:
    """Waits for a collective and returns its result; None for an unknown or already synchronised handle.

    Args:
        handle: what an ``_async`` call returned.
        timeout: seconds to wait at most; None for as long as it takes.

    Raises:
        CollectiveTimeoutError: it is not done within ``timeout``. It goes on, and ``handle`` may be waited for again.
        HorovodInternalError: the collective failed; the message says which ranks did what.
        TypeError: ``handle`` or ``timeout`` is no number.
    """
    pending = _find(handle)
    if pending is None:
        return None
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout == timeout):
        raise TypeError(f"timeout={timeout!r} was found, a number of seconds, or None for any, was expected")
    if timeout is not None and not pending.engine.poll(pending.handle):
        try:
            pending.engine.wait(pending.handle, max(timeout, 0.0))
        except CollectiveTimeoutError:
            if not pending.engine.poll(pending.handle):
                raise
        except HorovodInternalError:
            pass  # how it ended is raised below
    _pending.pop(handle, None)
    return pending.wait()
