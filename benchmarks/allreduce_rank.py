"""One rank of the allreduce bench: a member of a torch-gloo group and of a sparkvod world at the same time."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import alternate

KIB, MIB = 1 << 10, 1 << 20
# Bytes of the tensors, and calls per round: a round takes about a tenth of a second with gloo.
CALLS = {4: 200, MIB: 30, 16 * MIB: 5, 64 * MIB: 3}
SMALL_TENSORS, SMALL_BYTES = 200, 4 * KIB
IDLE_SECONDS = 5.0

GLOO, OURS, ENGINE_MEMORY = "torch-gloo", "sparkvod", "sparkvod, engine memory"


@dataclass(frozen=True)
class Subject:
    """Who is measured: how it makes a float32 tensor, and how it sums one, or many at once, in place over the ranks."""

    buffer: Callable[[int], Any]
    allreduce: Callable[[Any], None]
    allreduce_many: Callable[[list[Any]], None]


def subjects() -> dict[str, Subject]:
    """Returns the subjects by name; both worlds must have been joined."""
    import torch
    import torch.distributed as dist

    import sparkvod.torch as hvd
    from sparkvod.core import basics

    def ordinary(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes // 4)

    def engine_memory(nbytes: int) -> torch.Tensor:
        return torch.frombuffer(basics.engine().allocate(nbytes), dtype=torch.float32)

    def gloo_many(tensors: list[torch.Tensor]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def name(tensor: torch.Tensor) -> str:
        return f"bench.{tensor.nbytes}"

    def our_many(tensors: list[torch.Tensor]) -> None:
        handles = [hvd.allreduce_async_(tensor, name=f"many.{i}", op=hvd.Sum) for i, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    def ours(tensor: torch.Tensor) -> None:
        hvd.allreduce_(tensor, name=name(tensor), op=hvd.Sum)

    return {
        GLOO: Subject(ordinary, dist.all_reduce, gloo_many),
        OURS: Subject(ordinary, ours, our_many),
        ENGINE_MEMORY: Subject(engine_memory, ours, our_many),
    }


class Rank:
    """This process's part in the measurements; every rank calls the same methods in the same order.

    Args:
        rounds: rounds per case.
    """

    def __init__(self, rounds: int) -> None:
        import torch.distributed as dist

        self.dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rounds = rounds
        self.subjects = subjects()

    def verify(self, who: Subject, nbytes: int) -> None:
        """Raises unless a sum over the ranks, in place, is exactly right, for one tensor and for many."""
        import torch

        pattern = torch.arange(nbytes // 4, dtype=torch.float32) % 1000
        expected = pattern * self.size + sum(range(self.size))
        one, many = who.buffer(nbytes), [who.buffer(nbytes) for _ in range(3)]
        for tensor in [one, *many]:
            tensor.copy_(pattern + self.rank)
        who.allreduce(one)
        who.allreduce_many(many)
        for tensor in [one, *many]:
            if not torch.equal(tensor, expected):
                wrong = int((tensor != expected).sum())
                raise AssertionError(f"{wrong} of {tensor.numel()} sums are wrong on rank {self.rank}, {nbytes} bytes")

    def slowest(self, times: list[float]) -> float:
        """Returns the median over calls of the slowest rank's time, in seconds, on every rank."""
        by_rank: list[list[float]] = [[]] * self.size
        self.dist.all_gather_object(by_rank, times)
        return statistics.median(max(call) for call in zip(*by_rank, strict=True))

    def timed(self, call: Callable[[], None], calls: int, together: bool) -> float:
        """Measures one round: ``calls`` calls back to back, or each after a barrier (``together``)."""
        call()
        self.dist.barrier()
        times = []
        for _ in range(calls):
            if together:
                self.dist.barrier()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return self.slowest(times)

    def allreduce(self, nbytes: int) -> dict[str, list[float]]:
        """Measures allreduces of one size, in seconds per call, for every subject."""
        chosen = {name: who for name, who in self.subjects.items() if nbytes >= MIB or name != ENGINE_MEMORY}
        for who in chosen.values():
            self.verify(who, nbytes)
        # Zeros stay zeros, however often they are summed.
        buffers = {name: who.buffer(nbytes) for name, who in chosen.items()}
        return alternate(
            {
                name: lambda who=who, tensor=buffers[name]: self.timed(
                    lambda: who.allreduce(tensor), CALLS[nbytes], together=False
                )
                for name, who in chosen.items()
            },
            self.rounds,
        )

    def many_small(self) -> dict[str, list[float]]:
        """Measures 200 tensors of 4 KiB, all started and then all waited for, in seconds for all."""
        chosen = {name: self.subjects[name] for name in (GLOO, OURS)}
        buffers = {name: [who.buffer(SMALL_BYTES) for _ in range(SMALL_TENSORS)] for name, who in chosen.items()}
        return alternate(
            {
                name: lambda who=who, tensors=buffers[name]: self.timed(
                    lambda: who.allreduce_many(tensors), 3, together=True
                )
                for name, who in chosen.items()
            },
            self.rounds,
        )


def idle_cores(seconds: float) -> float:
    """Sleeps, and returns how many cores this process used meanwhile, with all its threads."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


def main(rank: int, size: int, meeting: str, rounds: int, results: Any) -> None:
    """Joins both worlds and measures; sends ``{case: {subject: values}}`` and the engine's statistics.

    Args:
        rank: rank of this process.
        size: number of ranks.
        meeting: path of a file that does not exist yet, where torch's ranks meet.
        rounds: rounds per case.
        results: end of a pipe; every rank sends ``(measurements, idle cores, stats)``.
    """
    import torch
    import torch.distributed as dist

    import sparkvod.torch as hvd
    from sparkvod import config
    from sparkvod.core import basics
    from sparkvod.launch import context

    # Over loopback gloo is fastest, and needs no name of this host that resolves.
    config.set_environment({"GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)

    def allgather(data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, data)
        return gathered

    with context.use(context.WorldContext(rank, size, allgather)):
        hvd.init()
        member = Rank(rounds)
        measured = {str(nbytes): member.allreduce(nbytes) for nbytes in CALLS}
        measured["small"] = member.many_small()
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.5)
        idle = idle_cores(IDLE_SECONDS)
        results.send((measured, idle, basics.engine().stats()))
        hvd.barrier()
        hvd.shutdown()
