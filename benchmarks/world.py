"""Ranks of a local bench: members of a torch-gloo group and of a sparkvod world at once, Open MPI beside them."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchmarks import openmpi, program
from benchmarks.harness import Report, alternate
from benchmarks.meeting import Meeting

DEADLINE_SECONDS = 600.0
KIB, MIB = 1 << 10, 1 << 20
GLOO, MPI, OURS, ENGINE_MEMORY = "torch-gloo", openmpi.NAME, "sparkvod", "sparkvod, engine memory"


@dataclass
class Member:
    """What one rank measures with.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        rounds: rounds per case.
        meeting: of the ranks.
        native: the native program.
        peer: asks Open MPI's ranks; on rank 0, and None where there is none.
    """

    rank: int
    size: int
    rounds: int
    meeting: Meeting
    native: Path
    peer: openmpi.Client | None

    def apart(self, measure: Callable[[], float]) -> Callable[[], float]:
        """Returns a subject that other processes measure, asked by rank 0 while the other ranks sleep."""
        return lambda: measure() if self.rank == 0 else 0.0

    def program(self, *arguments: object) -> Callable[[], float]:
        """Returns a mode of the native program as a subject."""
        return self.apart(lambda: program.run(self.native, *arguments)["seconds"])

    def mpi(self, what: str, nbytes: int, calls: int) -> dict[str, Callable[[], float]]:
        """Returns Open MPI as a subject, nothing where there is none."""
        if openmpi.missing() is not None:
            return {}
        return {MPI: self.apart(lambda: self.peer.seconds(what, nbytes, calls) if self.peer else 0.0)}

    def alternate(self, subjects: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Measures the subjects in alternating rounds; rank 0's values count."""
        return alternate(subjects, self.rounds)


def peers_of(report: Report) -> list[str]:
    """Returns who is measured beside us; the report is told why Open MPI is missing where it is."""
    if (why := openmpi.missing()) is not None:
        report.miss(MPI, why)
        return [GLOO]
    return [GLOO, MPI]


def _rank(
    body: Callable[[Member], Any], rank: int, size: int, folder: Path, peers: Path | None, rounds: int, results: Any
) -> None:
    """A rank's process: sends whether all went well, and what ``body`` returned or else the traceback."""
    try:
        told = (True, _in_world(body, rank, size, folder, peers, rounds))
    except Exception as error:  # in_ranks raises it
        told = (False, "".join(traceback.format_exception(error)))
    results.send(told)


def _in_world(
    body: Callable[[Member], Any], rank: int, size: int, folder: Path, peers: Path | None, rounds: int
) -> Any:
    import torch
    import torch.distributed as dist

    import sparkvod.torch as hvd
    from sparkvod import config
    from sparkvod.launch import context

    # Over loopback gloo is fastest, and needs no name of this host that resolves.
    config.set_environment({"GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of the group's calls by their older names
    dist.init_process_group("gloo", init_method=f"file://{folder / 'gloo'}", rank=rank, world_size=size)

    def allgather(data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, data)
        return gathered

    with context.use(context.WorldContext(rank, size, allgather)):
        hvd.init()
        meeting = Meeting(folder / "meeting", rank, size)
        peer = openmpi.Client(peers, size) if peers is not None and rank == 0 else None
        native = program.ROOT / "build" / "bench" / "sparkvod_bench"
        measured = body(Member(rank, size, rounds, meeting, native, peer))
        hvd.barrier()
        hvd.shutdown()
    return measured


def in_ranks(body: Callable[[Member], Any], size: int, rounds: int) -> list[Any]:
    """Runs ``body`` in ``size`` processes and returns what each returned, by rank.

    Raises:
        RuntimeError: a rank failed, or the deadline passed.
    """
    program.build()
    spawn = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + DEADLINE_SECONDS
    with _folder() as folder, openmpi.world(folder / "mpi", size) as peers:
        Meeting.make(folder / "meeting")
        pipes = [spawn.Pipe(duplex=False) for _ in range(size)]
        processes = [
            spawn.Process(target=_rank, args=(body, rank, size, folder, peers, rounds, pipes[rank][1]), daemon=True)
            for rank in range(size)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            sent: dict[int, Any] = {}
            left = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
            while left:
                ready = connection.wait(list(left), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RuntimeError(f"ranks {sorted(left.values())} measured nothing within {DEADLINE_SECONDS:g} s")
                for receiver in ready:
                    rank = left.pop(receiver)
                    try:
                        good, value = receiver.recv()
                    except EOFError:
                        raise RuntimeError(f"rank {rank} of {size} ended before it had measured everything") from None
                    if not good:
                        raise RuntimeError(f"rank {rank} of {size} failed:\n{value}")
                    sent[rank] = value
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            return [sent[rank] for rank in range(size)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sparkvod-bench-") as folder:
        yield Path(folder)
