"""Reads ahead in a thread, so that decoding and training overlap."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from sparkvod import log

T = TypeVar("T")
# How long the end of an iteration waits for a thread that may be in a read of a store that does not answer.
_CLOSE_SECONDS = 60.0


class _Shared:
    """What the thread and its owner share; the thread must not keep the owner alive."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[Any] = deque()
        self.changed = threading.Condition()
        self.ended = self.closed = False
        self.error: BaseException | None = None


def _fill(shared: _Shared, iterator: Iterator[Any]) -> None:
    """The thread: moves items into the queue until the end, an error, or close; then closes the iterator."""
    error: BaseException | None = None
    try:
        try:
            for item in iterator:
                with shared.changed:
                    shared.changed.wait_for(lambda: shared.closed or len(shared.items) < shared.depth)
                    if shared.closed:
                        break
                    shared.items.append(item)
                    shared.changed.notify_all()
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
    except BaseException as raised:  # handed to the consumer, whatever it is
        error = raised
    with shared.changed:
        shared.error, shared.ended = error, True
        shared.changed.notify_all()


class Prefetcher(Generic[T]):
    """An iterator that runs another one ahead in a daemon thread. Close it, or use it as a context manager."""

    def __init__(self, iterator: Iterable[T], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} was found, at least 1 was expected")
        self._shared = _Shared(depth)
        self._thread = threading.Thread(
            target=_fill, args=(self._shared, iter(iterator)), name="sparkvod-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.items or shared.ended or shared.closed)
            if shared.items and not shared.closed:
                item: T = shared.items.popleft()
                # The thread is woken when half of the queue is free: one hand-over for several items.
                if len(shared.items) <= shared.depth // 2:
                    shared.changed.notify_all()
                return item
            error, shared.error = shared.error, None
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread and waits for it; the iterator behind is closed. More calls do nothing."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.items.clear()
            self._shared.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                log.get("data").warning("the reading thread did not end within %g s and is left alone", _CLOSE_SECONDS)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Without close(): let the thread go, but do not wait for it inside the garbage collector.
        shared = getattr(self, "_shared", None)
        if shared is not None:
            with shared.changed:
                shared.closed = True
                shared.changed.notify_all()


def prefetch(iterator: Iterable[T], depth: int = 64) -> Prefetcher[T]:
    """Returns an iterator over the same items that reads up to ``depth`` of them ahead in a thread.

    An exception of ``iterator`` is raised where the item would have come. Close the returned iterator (or use it in
    ``with``) when you stop before the end: that stops the thread and closes ``iterator``, if it has ``close()``.

    Args:
        iterator: what to iterate; after this call it belongs to the thread.
        depth: items to hold at most.
    """
    return Prefetcher(iterator, depth)
