"""Open MPI beside us, where it is installed: a world of its own processes, which sleep until they are asked to measure.

They are asked through named pipes, one for each rank: an MPI rank that waits for another one in MPI spins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import program

NAME = "Open MPI"
DEADLINE_SECONDS = 60.0


def missing() -> str | None:
    """Returns why there is no Open MPI here, None where there is one."""
    if importlib.util.find_spec("mpi4py") is None:
        return "not installed (mpi4py)"
    if program.tool("mpirun") is None:
        return "not installed (mpirun)"
    return None


@contextlib.contextmanager
def world(folder: Path, size: int) -> Iterator[Path | None]:
    """Starts ranks that measure on request; yields the folder of their pipes, None where there is no Open MPI."""
    if missing() is not None:
        yield None
        return
    folder.mkdir()
    for name in [*(f"rank-{rank}" for rank in range(size)), "answer"]:
        os.mkfifo(folder / name)
    # A rank to a core is what it does by itself, where there are enough; else they must leave the cores to each other.
    crowded = size > len(os.sched_getaffinity(0))
    binding = ["--bind-to", "none"] if crowded else []
    command = [str(program.tool("mpirun")), "--allow-run-as-root", "--oversubscribe", *binding, "-np", str(size)]
    process = subprocess.Popen(
        [*command, sys.executable, "-m", "benchmarks.openmpi_rank", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(program.ROOT), "OMPI_MCA_mpi_yield_when_idle": str(int(crowded))},
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Client:
    """Asks the ranks of a world.

    Args:
        folder: of their pipes.
        size: number of ranks.
    """

    def __init__(self, folder: Path, size: int) -> None:
        # For reading and writing, so that opening does not wait for the other side.
        self._asking = [os.open(folder / f"rank-{rank}", os.O_RDWR) for rank in range(size)]
        self._answers = os.open(folder / "answer", os.O_RDWR | os.O_NONBLOCK)
        self._heard = b""

    def seconds(self, what: str, nbytes: int, calls: int) -> float:
        """Returns the median of some calls of a collective of float32.

        Args:
            what: allreduce, many, allgather, broadcast, alltoall or reducescatter.
            nbytes: bytes of one rank's tensor; of allgather the result's.
            calls: how many.

        Raises:
            RuntimeError: no answer came in time.
        """
        line = json.dumps({"what": what, "nbytes": nbytes, "calls": calls}).encode() + b"\n"
        for pipe in self._asking:
            os.write(pipe, line)
        until = time.monotonic() + DEADLINE_SECONDS
        while b"\n" not in self._heard:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise RuntimeError(f"Open MPI did not answer within {DEADLINE_SECONDS:g} s: {what} of {nbytes} bytes")
            self._heard += os.read(self._answers, 4096)
        answer, _, self._heard = self._heard.partition(b"\n")
        return float(answer)
