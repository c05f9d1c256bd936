"""The response cache: what was agreed on once is one bit for every collective, and shapes may change at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch

from tests.contracts.worlds import Suite


def join() -> None:
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def _asked(call: Callable[[], Any]) -> tuple[int, int]:
    # Requests of this rank that were one bit, and such that travelled in full, during the call.
    import sparkvod.torch as hvd

    before = hvd.stats()
    call()
    after = hvd.stats()
    return tuple(after[key] - before[key] for key in ("cache_hits", "cache_misses"))


def _collectives(members: Any) -> dict[str, Callable[[int], Any]]:
    """Each collective, of so many rows, or of other rows on each rank; what is wrong in the result raises."""
    import sparkvod.torch as hvd

    n, place = members.size() or hvd.size(), members.rank()
    ranks = members.ranks

    def at(name: str) -> dict[str, Any]:
        return {"name": name, "process_set": members}

    def ones(rows: int) -> torch.Tensor:
        return torch.ones(rows, 2)

    def rows_are(tensor: torch.Tensor, rows: int, value: float = 1.0) -> None:
        assert tensor.shape == (rows, 2)
        assert bool((tensor == value).all())

    def reducescatter(rows: int) -> None:
        rows_are(hvd.reducescatter(ones(rows * n), op=hvd.Sum, **at("reducescatter")), rows, n)

    def unequal(rows: int) -> None:
        rows_are(hvd.allgather(ones(rows * (place + 1)), **at("unequal")), rows * n * (n + 1) // 2)

    def alltoall(rows: int) -> None:
        received, _ = hvd.alltoall(
            ones(rows * sum(range(n))), splits=[rows * other for other in range(n)], **at("alltoall")
        )
        rows_are(received, rows * place * n)

    return {
        "allreduce": lambda rows: rows_are(hvd.allreduce(ones(rows), op=hvd.Sum, **at("allreduce")), rows, n),
        "grouped allreduce": lambda rows: [
            rows_are(t, rows, n) for t in hvd.grouped_allreduce([ones(rows)] * 2, op=hvd.Sum, **at("grouped allreduce"))
        ],
        "allgather": lambda rows: rows_are(hvd.allgather(ones(rows), **at("allgather")), rows * n),
        "allgather of unequal rows": unequal,
        "grouped allgather": lambda rows: [
            rows_are(t, rows * n) for t in hvd.grouped_allgather([ones(rows)] * 2, **at("grouped allgather"))
        ],
        "broadcast": lambda rows: rows_are(
            hvd.broadcast(ones(rows) * (place + 1), ranks[-1], **at("broadcast")), rows, n
        ),
        "reducescatter": reducescatter,
        "grouped reducescatter": lambda rows: [
            rows_are(t, rows, n)
            for t in hvd.grouped_reducescatter([ones(rows * n)] * 2, op=hvd.Sum, **at("grouped reducescatter"))
        ],
        "alltoall": alltoall,
    }


def check_every_collective_and_other_shapes() -> None:
    import sparkvod.torch as hvd

    small = [hvd.global_process_set] + ([hvd.add_process_set([0, 2])] if hvd.size() == 3 else [])
    for members in small:
        if not members.included():
            continue
        for name, call in _collectives(members).items():
            # A new shape travels in full, once; what was known in between as well.
            for rows in (3, 5, 3):
                found = [_asked(lambda call=call, rows=rows: call(rows)) for _ in range(3)]
                assert found == [(0, 1), (1, 0), (1, 0)], (name, members, rows, found)
        found = [_asked(lambda members=members: hvd.barrier(process_set=members)) for _ in range(3)]
        assert found[1:] == [(1, 0), (1, 0)], found


def check_a_shape_that_one_rank_alone_changes() -> None:
    import sparkvod.torch as hvd

    # Only rank 1's rows change: the others' request is as before, but what was agreed on is not.
    for rows in (1, 1, 4, 4, 0, 2):
        gathered = hvd.allgather(torch.ones(rows if hvd.rank() == 1 else 2, 3), name="changing")
        assert gathered.shape == (2 * (hvd.size() - 1) + rows, 3)


def check_more_names_than_it_holds() -> None:
    import sparkvod.torch as hvd

    for _ in range(2):
        for number in range(40):
            total = hvd.allreduce(torch.full((2,), float(number)), name=f"name {number}", op=hvd.Sum)
            assert total.tolist() == [number * hvd.size()] * 2
    # What was used last is kept.
    assert _asked(lambda: hvd.allreduce(torch.ones(2), name="name 39", op=hvd.Sum)) == (1, 0)
    assert _asked(lambda: hvd.allreduce(torch.ones(2), name="name 0", op=hvd.Sum)) == (0, 1)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_COLLECTIVE_TIMEOUT": "30", "SPARKVOD_CACHE_CAPACITY": "32"})


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_cache(check: str, size: int) -> None:
    SUITE.verify(check, size)
