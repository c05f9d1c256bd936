"""The prefetch thread: same items, errors in their place, nothing left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from sparkvod.data import prefetch

pytestmark = pytest.mark.timeout(20)


class Source:
    """Counts, and remembers how far it was read and whether it was closed."""

    def __init__(self, end: int, error: BaseException | None = None) -> None:
        self.read, self.closed, self.end, self.error = 0, False, end, error
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[int]:
        self.thread = threading.current_thread()
        try:
            while self.read < self.end:
                self.read += 1
                yield self.read
            if self.error:
                raise self.error
        finally:
            self.closed = True


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sparkvod-prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 7, 1000])
def test_same_items(depth: int) -> None:
    with prefetch(Source(100), depth) as items:
        assert list(items) == list(range(1, 101))
        assert list(items) == []
    assert threads() == []


def test_reads_ahead_up_to_depth() -> None:
    source = Source(100)
    items = prefetch(source, 5)
    assert next(items) == 1
    deadline = time.monotonic() + 5
    while source.read < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert 6 <= source.read <= 7
    items.close()
    items.close()
    assert source.closed
    assert threads() == []
    with pytest.raises(StopIteration):
        next(items)


def test_errors_come_after_the_items_before_them() -> None:
    items = prefetch(Source(3, KeyError("broken")), 10)
    assert [next(items) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(KeyError, match="broken"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    assert threads() == []


def test_dropped_without_close() -> None:
    source = Source(100)
    items = prefetch(source, 2)
    next(items)
    del items
    gc.collect()
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []
    assert source.closed


def test_bad_depth() -> None:
    with pytest.raises(ValueError, match="depth=0"):
        prefetch([], 0)
