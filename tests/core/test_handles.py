from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from sparkvod.core import handles
from sparkvod.core.handles import Pending
from sparkvod.errors import HorovodInternalError


class Block:
    """Memory."""


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


class Failing(Interrupted):
    """An engine whose operations 1 and 3 fail, and whose wait for 4 is interrupted."""

    def wait(self, handle: int) -> None:
        if handle in (1, 3):
            raise HorovodInternalError(f"operation {handle} failed")
        if handle == 4:
            raise KeyboardInterrupt


def test_all_are_waited_for_whatever_comes_of_them() -> None:
    engine: Any = Failing()
    engine.done = True
    with pytest.raises(HorovodInternalError, match="operation 1 failed"):
        handles.wait_for_all([Pending(engine, handle, None, None) for handle in (1, 2, 3)])
    assert engine.released == [1, 2, 3]
    engine.done, block = False, Block()
    memory = weakref.ref(block)
    pending = [Pending(engine, 4, None, None), Pending(engine, 5, None, block)]
    del block
    with pytest.raises(KeyboardInterrupt):
        handles.wait_for_all(pending)
    pending.clear()
    gc.collect()
    assert memory() is not None  # the engine may still write there
    assert engine.released == [1, 2, 3]
    engine.done = True
    handles.abandon(Pending(engine, 6, None, None))
    assert engine.released == [1, 2, 3, 4, 5, 6]
    assert memory() is None


def test_unknown_handles() -> None:
    assert handles.synchronize(-5) is None
    assert handles.poll(-5)


def test_what_a_dropped_owner_has_left_keeps_its_memory_until_it_has_ended() -> None:
    class Owner:
        pass

    engine: Any = Interrupted()
    owner, block = Owner(), Block()
    memory = weakref.ref(block)
    left = [Pending(engine, 3, None, block)]
    handles.abandon_all(owner, lambda: left)
    del block, owner
    gc.collect()
    left.clear()
    assert memory() is not None  # nobody else holds it
    assert engine.released == []
    engine.done = True
    handles.abandon(Pending(engine, 4, None, None))
    assert engine.released == [3, 4]
    assert memory() is None


def test_how_long_to_wait_is_a_number() -> None:
    engine: Any = Interrupted()
    handle = handles.add(Pending(engine, 1, None, None))
    for wrong in ("1", float("nan"), [1]):
        with pytest.raises(TypeError, match="timeout=.* was found, a number of seconds, or None"):
            handles.synchronize(handle, timeout=wrong)
    del handles._pending[handle]
