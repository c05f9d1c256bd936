"""One rank of Open MPI's world: measures what it is asked for. Run by ``mpirun``; see ``openmpi.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.meeting import Meeting

SMALL_TENSORS = 200
LATENCY_BYTES = 4096


def collective(comm: Any, what: str, nbytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns a collective of float32 as a call, and what writes this rank's whole input before it."""
    rank, size, count = comm.Get_rank(), comm.Get_size(), nbytes // 4
    if what == "many":
        tensors = [np.zeros(count, np.float32) for _ in range(SMALL_TENSORS)]
        return (
            lambda: MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, tensor) for tensor in tensors]),
            lambda: [tensor.fill(rank + 1) for tensor in tensors],
        )
    whole, part = np.zeros(count, np.float32), np.zeros(count // size, np.float32)
    if what == "allreduce":
        return lambda: comm.Allreduce(MPI.IN_PLACE, whole), lambda: whole.fill(rank + 1)
    if what == "allgather":
        return lambda: comm.Allgather(part, whole), lambda: part.fill(rank + 1)
    if what == "broadcast":
        return lambda: comm.Bcast(whole, 0), lambda: whole.fill(rank + 1)
    if what == "alltoall":
        out = np.zeros(count, np.float32)
        return lambda: comm.Alltoall(whole, out), lambda: whole.fill(rank + 1)
    if what == "reducescatter":
        return lambda: comm.Reduce_scatter_block(whole, part), lambda: whole.fill(rank + 1)
    raise ValueError(f"no collective {what!r}")


def main(folder: Path) -> None:
    """Answers until the one who asks is gone."""
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank == 0:
        Meeting.make(folder / "meeting")
    comm.Barrier()
    meeting = Meeting(folder / "meeting", rank, size, progress=comm.Iprobe)
    known: dict[tuple[str, int], tuple[Callable[[], object], Callable[[], object]]] = {}
    with (folder / f"rank-{rank}").open() as asked, (folder / "answer").open("w") as answers:
        for line in asked:
            what, nbytes, calls = (json.loads(line)[key] for key in ("what", "nbytes", "calls"))
            if (what, nbytes) not in known:
                known[what, nbytes] = collective(comm, what, nbytes)
            call, prepare = known[what, nbytes]
            back_to_back = what == "allreduce" and nbytes < LATENCY_BYTES
            seconds = meeting.timed(call, calls, None if back_to_back else prepare)
            if rank == 0:
                answers.write(f"{seconds!r}\n")
                answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
