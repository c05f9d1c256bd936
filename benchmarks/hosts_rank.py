"""One rank of the bench of two hosts: sums on the engine alone, and prints its times as JSON."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from sparkvod.core import basics
from sparkvod.core.basics import engine

FLOAT32, SUM = 8, 1  # the engine's codes


def main(nbytes: int, calls: int) -> None:
    """Measures ``calls`` allreduces of float32 in engine memory, each after a barrier."""
    basics.init()
    memory = engine().allocate(nbytes)
    values = np.frombuffer(memory, dtype=np.float32)
    rank, size, times = engine().rank, engine().size, []
    for number in range(-2, calls):
        values[:] = rank + 1
        handle = engine().barrier(f"barrier.{number}")
        engine().wait(handle)
        engine().release(handle)
        start = time.perf_counter()
        handle = engine().allreduce("sum", memory.address, memory.address, values.size, FLOAT32, SUM, wake=False)
        engine().wait(handle)
        if number >= 0:
            times.append(time.perf_counter() - start)
        engine().release(handle)
        if not (values == size * (size + 1) / 2).all():
            raise AssertionError(f"wrong sums on rank {rank}")
    way = max(way for way in engine().stats()["collectives"] if way.startswith("allreduce"))
    basics.shutdown()
    print(json.dumps({"times": times, "way": way}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
