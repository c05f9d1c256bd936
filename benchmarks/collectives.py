"""Allgather, broadcast, alltoall and reducescatter on 2, 4 and 8 local ranks beside torch-gloo and Open MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.allreduce import faster_than_peers
from benchmarks.harness import MIN_ROUNDS, Report, show
from benchmarks.world import ENGINE_MEMORY, GLOO, MIB, OURS, Member, in_ranks, peers_of

NAMES = ("allgather", "broadcast", "alltoall", "reducescatter")
# Bytes, and calls per round, by number of ranks. They are of one rank's tensor; of allgather, of the result.
CALLS = {2: {MIB: 20, 16 * MIB: 4}, 4: {MIB: 10, 16 * MIB: 3}, 8: {MIB: 4, 16 * MIB: 2}}


class Subjects:
    """What a rank measures in its own process; each call of a method is made by all ranks in the same order."""

    def __init__(self, member: Member) -> None:
        import torch
        import torch.distributed as dist

        import sparkvod.torch as hvd

        self.member, self.torch, self.dist, self.hvd = member, torch, dist, hvd

    def gloo(self, name: str, nbytes: int) -> tuple[Any, Callable[[], Any]]:
        """Returns the input and the call, which returns the output."""
        dist, size, count = self.dist, self.member.size, nbytes // 4
        whole, part = self.torch.empty(count), self.torch.empty(count // size)
        out = self.torch.empty(count)
        given = part if name == "allgather" else whole
        calls = {
            "allgather": lambda: (dist.all_gather_into_tensor(out, part), out)[1],
            "broadcast": lambda: (dist.broadcast(whole, 0), whole)[1],
            "alltoall": lambda: (dist.all_to_all_single(out, whole), out)[1],
            "reducescatter": lambda: (dist.reduce_scatter_tensor(part, whole), part)[1],
        }
        return given, calls[name]

    def ours(self, name: str, nbytes: int, engine_memory: bool) -> tuple[Any, Callable[[], Any]]:
        """Returns the same of sparkvod, whose outputs are new tensors; broadcast is in place."""
        hvd, empty = self.hvd, self.hvd.empty if engine_memory else self.torch.empty
        given = empty(nbytes // 4 // (self.member.size if name == "allgather" else 1))
        key = f"{name}.{nbytes}.{engine_memory}"
        calls = {
            "allgather": lambda: hvd.allgather(given, name=key),
            "broadcast": lambda: hvd.broadcast_(given, 0, name=key),
            "alltoall": lambda: hvd.alltoall(given, name=key),
            "reducescatter": lambda: hvd.reducescatter(given, op=hvd.Sum, name=key),
        }
        return given, calls[name]

    def subject(self, who: str, name: str, nbytes: int, calls: int) -> Callable[[], float]:
        """Returns a subject whose result was verified."""
        given, call = self.gloo(name, nbytes) if who == GLOO else self.ours(name, nbytes, who == ENGINE_MEMORY)
        self.verify(who, name, given, call)
        rank = self.member.rank
        return lambda: self.member.meeting.timed(call, calls, lambda: given.fill_(rank + 1))

    def verify(self, who: str, name: str, given: Any, call: Callable[[], Any]) -> None:
        """Raises unless the collective's result is exactly right."""
        torch, rank, size = self.torch, self.member.rank, self.member.size
        place = torch.arange(given.numel(), dtype=torch.float32) % 1000

        def of(r: int) -> Any:
            return place + 1000 * r

        def share(values: Any) -> Any:
            return values.reshape(size, -1)[rank]

        given.copy_(of(rank))
        expected = {
            "allgather": lambda: torch.cat([of(r) for r in range(size)]),
            "broadcast": lambda: of(0),
            "alltoall": lambda: torch.cat([share(of(r)) for r in range(size)]),
            "reducescatter": lambda: share(sum(of(r) for r in range(size))),
        }[name]()
        if not torch.equal(call(), expected):
            raise AssertionError(f"{who}: {name} of {given.nbytes} bytes is wrong on rank {rank} of {size}")


def body(member: Member) -> dict[str, dict[str, list[float]]]:
    """What a rank does: returns its measurements."""
    subjects, measured = Subjects(member), {}
    for name in NAMES:
        for nbytes, calls in CALLS[member.size].items():
            chosen = {who: subjects.subject(who, name, nbytes, calls) for who in (GLOO, OURS, ENGINE_MEMORY)}
            measured[f"{name} {show(nbytes, 'B')}"] = member.alternate(chosen | member.mpi(name, nbytes, calls))
    return measured


def run(report: Report) -> None:
    """Measures worlds of 2, 4 and 8 ranks."""
    peers = peers_of(report)
    for size in CALLS:
        for what, rounds in in_ranks(body, size, MIN_ROUNDS if report.quick or size > 2 else 7)[0].items():
            case = f"{what}, {size} ranks"
            report.add(case, rounds)
            faster_than_peers(report, case, OURS, peers)
