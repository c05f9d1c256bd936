"""Operations without a name from several threads of a rank: right where their order is, refused at once where not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch

from tests.contracts.worlds import run_in_world


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Returns what each call returned or raised, each in a thread, begun one after the other."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return found


def overlapping_on_a_rank(kind: str) -> tuple[list[Any], float]:
    """Two unnamed operations of a kind at once on rank 0, one after the other on the others."""
    import sparkvod.torch as hvd

    hvd.init()
    one = torch.ones(4)
    call: Callable[[], Any] = {
        "allreduce": lambda: hvd.allreduce(one),
        "allreduce_": lambda: hvd.allreduce_(one),
        "allgather": lambda: hvd.allgather(one),
        "barrier": hvd.barrier,
    }[kind]
    began = time.monotonic()
    if hvd.rank() == 0:
        found = in_threads(call, call)
    else:
        time.sleep(0.5)
        try:
            found = [call(), call()]
        except Exception as error:
            found = [error]
    seconds = time.monotonic() - began
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    return [f"{type(each).__name__}: {each}" for each in found], seconds


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["allreduce", "allreduce_", "allgather", "barrier"])
def test_threads_that_overlap_are_refused_at_once_on_all_ranks(kind: str) -> None:
    (first, first_seconds), (other, other_seconds) = run_in_world(overlapping_on_a_rank, (kind,))
    assert first[1].startswith("ValueError: two threads have each called")
    assert "pass name=" in first[1]
    for failed in (first[0], other[0]):
        assert "two threads have each called" in failed, failed
        assert not failed.startswith("ValueError")
    assert max(first_seconds, other_seconds) < 3


def in_order_on_a_rank() -> None:
    """Threads in turn, one thread's asynchronous operations, names, and different kinds at once."""
    import sparkvod.torch as hvd

    hvd.init()
    n, rank = hvd.size(), hvd.rank()

    def total(value: float, name: str | None = None) -> float:
        return hvd.allreduce(torch.full((3,), value), op=hvd.Sum, name=name)[0].item()

    for number in range(5):
        found: list[float] = []
        thread = threading.Thread(target=lambda k=number, to=found: to.append(total(float(k))))
        thread.start()
        thread.join()
        assert found == [number * n]
        assert total(1.0) == n
    handles = [hvd.allreduce_async(torch.full((3,), float(k)), op=hvd.Sum) for k in range(8)]
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [k * n for k in range(8)]
    if rank == 0:
        time.sleep(0.3)  # so that the others' overlap
    named = in_threads(lambda: total(1.0, "one"), lambda: total(2.0, "two"))
    assert named == [n, 2 * n]
    kinds = in_threads(lambda: total(1.0), lambda: hvd.allgather(torch.ones(1)).sum().item(), hvd.barrier)
    assert kinds == [n, n, None]


@pytest.mark.timeout(60)
def test_an_order_that_all_ranks_know() -> None:
    run_in_world(in_order_on_a_rank, size=2)
