"""Processes that a function forks, on both launchers: they never speak for their rank."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from sparkvod import run_local
from sparkvod.launch import context
from sparkvod.launch._call import call
from sparkvod.launch.spark import run
from sparkvod.observe import mailbox

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_leaks")]
Run = Callable[..., list[Any]]


@pytest.fixture(params=["local", "spark"])
def launch(request: pytest.FixtureRequest) -> Run:
    if request.param == "local":
        return lambda fn, args=(), **options: run_local(fn, args, np=2, **options)
    request.getfixturevalue("spark")
    return lambda fn, args=(), **options: run(fn, args, num_proc=2, **options)


def fork_and_end(how: str) -> tuple[int, int]:
    """Forks; the child ends the function in some way, the parent returns the child's exit status and its rank."""
    world = context.current()
    assert world is not None
    context.on_exit(lambda error: print("hook", os.getpid() == mine))
    mine = os.getpid()
    child = os.fork()
    if child == 0:
        if how == "raises":
            raise KeyError("of the child")
        if how == "exits":
            sys.exit(5)
        mailbox.current().post("child", of=world.rank)
        return -1, -1
    _, status = os.waitpid(child, 0)
    assert world.allgather(b"x") == [b"x", b"x"]
    return os.waitstatus_to_exitcode(status), world.rank


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1), ("exits", 5)])
def test_a_forked_child_does_not_speak_for_its_rank(
    launch: Run, how: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(fork_and_end, (how,)) == [(status, 0), (status, 1)]
    out, err = capsys.readouterr()
    assert out.count("hook True") == 2
    assert "hook False" not in out
    assert ("KeyError: 'of the child'" in err) is (how == "raises")


def test_a_child_that_outlives_the_call_keeps_still(launch: Run) -> None:
    def fn() -> int:
        if os.fork() == 0:
            time.sleep(0.5)
            return -1
        return 1

    assert launch(fn) == [1, 1]
    assert launch(fn) == [1, 1]
    time.sleep(1)


def test_a_childs_all_gather_is_refused(launch: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def fn() -> int:
        child = os.fork()
        if child == 0:
            context.current().allgather(b"")  # type: ignore[union-attr]
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert launch(fn) == [1, 1]
    assert capsys.readouterr().err.count("tried an all-gather, only the rank itself may") == 2


def square(value: int) -> int:
    os.write(1, b"squares %d\n" % value) if sys.stdout is sys.__stdout__ else print("squares", value)
    return value * value


def test_a_pool_of_forks_works(launch: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def fn() -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(square, range(5))

    assert launch(fn) == [[0, 1, 4, 9, 16]] * 2
    assert capsys.readouterr().out.count("squares 3") == 2


def test_loader_workers_of_torch_work_in_a_world(launch: Run) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sparkvod._native", reason="the engine is not built")

    def fn() -> float:
        import torch

        import sparkvod.torch as hvd

        hvd.init()
        total = torch.zeros(1)
        for _ in range(2):
            loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
            for batch in loader:
                total += hvd.allreduce(batch.sum(), op=hvd.Sum)
        return float(total)

    assert launch(fn) == [2 * 2 * 28.0] * 2


def test_the_call_itself() -> None:
    assert call(lambda a, b: a + b, (1,), {"b": 2}) == 3
    with pytest.raises(KeyError):
        call({}.__getitem__, ("x",), {})


@pytest.mark.parametrize(("code", "status"), [(None, 0), (3, 3), ("a text", 1), (True, 1)])
def test_the_status_of_a_child_that_exits(code: Any, status: int) -> None:
    def fn() -> int:
        child = os.fork()
        if child == 0:
            sys.exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert call(fn, (), {}) == status
