from __future__ import annotations

from typing import Any

import pytest

from sparkvod.core import handles
from sparkvod.core.handles import Pending


class Interrupted:
    """An engine whose wait is interrupted, and whose operation ends later."""

    def __init__(self) -> None:
        self.done, self.released = False, []

    def wait(self, handle: int) -> None:
        raise KeyboardInterrupt

    def poll(self, handle: int) -> bool:
        return self.done

    def release(self, handle: int) -> None:
        self.released.append(handle)


def test_an_interrupted_wait_keeps_the_memory_until_the_operation_has_ended() -> None:
    engine: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        Pending(engine, 1, None, object()).wait()
    assert engine.released == []
    engine.done = True
    with pytest.raises(KeyboardInterrupt):
        Pending(engine, 2, None, None).wait()
    assert sorted(engine.released) == [1, 2]


def test_unknown_handles() -> None:
    assert handles.synchronize(-5) is None
    assert handles.poll(-5)
