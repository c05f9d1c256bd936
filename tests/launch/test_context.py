from __future__ import annotations

from typing import Any

import pytest

from sparkvod.launch import context
from sparkvod.launch.context import WorldContext


def alone(data: bytes) -> list[bytes]:
    return [data]


@pytest.mark.parametrize(("rank", "size"), [(-1, 1), (1, 1), (0, 0), (5, 3)])
def test_a_world_that_cannot_be_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of a world of {size} was found"):
        WorldContext(rank, size, alone)


def test_the_world_is_set_for_the_body_only() -> None:
    assert context.current() is None
    with context.use(WorldContext(0, 1, alone)) as world:
        assert context.current() is world
        with (
            pytest.raises(RuntimeError, match="already is rank 0 of a world of 1"),
            context.use(WorldContext(0, 1, alone)),
        ):
            pass
        assert context.current() is world
    assert context.current() is None


def test_hooks_run_newest_first_once_with_the_error() -> None:
    calls: list[Any] = []
    error = ValueError("the reason")

    def hook(e: BaseException | None) -> None:
        calls.append(("first", e, context.current() is not None))

    def fn() -> None:
        with context.use(WorldContext(0, 1, alone)):
            context.on_exit(hook)
            context.on_exit(hook)
            context.on_exit(lambda e: calls.append(("second", e, context.current() is not None)))
            raise error

    with pytest.raises(ValueError, match="the reason"):
        fn()
    assert calls == [("second", error, True), ("first", error, True)]
    context.run_exit_hooks(None)
    assert len(calls) == 2


def test_a_hook_that_raises_neither_hides_the_result_nor_stops_the_others(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def bad(e: BaseException | None) -> None:
        raise RuntimeError("a bad hook")

    with context.use(WorldContext(0, 1, alone)):
        context.on_exit(lambda e: calls.append(1))
        context.on_exit(bad)
    assert calls == [1]
    assert "a bad hook" in caplog.text


def test_a_hook_may_be_taken_back() -> None:
    calls: list[int] = []

    def hook(e: BaseException | None) -> None:
        calls.append(1)

    with context.use(WorldContext(0, 1, alone)):
        context.on_exit(hook)
        context.remove_exit_hook(hook)
        context.remove_exit_hook(hook)
    assert calls == []
