"""A rank that runs out of descriptors, or one that waits for it: ``descriptors_script.py RANK``.

The rank begins with no descriptor to spare, then with one, two, …, until the world comes together; the others try as
long. Each prints as JSON what it heard, the seconds that each try took, and what it held before and after.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator

from sparkvod import config
from sparkvod.core import basics, process_sets  # noqa: F401  (init imports it, for which a descriptor is needed)
from sparkvod.core.handles import Pending
from sparkvod.errors import HorovodInternalError, LaunchError

LIMIT = 200


@contextlib.contextmanager
def starved(spare: int) -> Iterator[None]:
    """Leaves this process so many descriptors to spare."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(2))
        for _ in range(spare):
            os.close(held.pop())
        yield
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def add(spare: int | None) -> float:
    """Joins a world with so many descriptors to spare, None for enough, and returns the sum of ones over its ranks.

    The sum belongs to the try: a rank whose own connections are made hears only in it that another has failed.
    """
    with contextlib.nullcontext() if spare is None else starved(spare):
        basics.init()
        engine = basics.engine()
        memory = engine.allocate(8)
        view = memoryview(memory).cast("f")
        view[0] = 1.0
        Pending(engine, engine.allreduce("x", memory.address, memory.address, 2, 8, 1), None, memory).wait()
        return view[0]


def main(faulty: int) -> None:
    """Tries until the world has come together, and tells what happened."""
    is_faulty = config.get("rank") == faulty
    before = len(os.listdir("/proc/self/fd"))
    heard: list[str] = []
    seconds: list[float] = []
    value = 0.0
    for spare in range(60):
        begun = time.monotonic()
        try:
            value = add(spare if is_faulty else None)
            break
        except (HorovodInternalError, LaunchError) as error:
            heard.append(f"{type(error).__name__}: {error}")
            seconds.append(time.monotonic() - begun)
        finally:
            basics.shutdown()
    held = [before, len(os.listdir("/proc/self/fd"))]
    print(json.dumps({"heard": heard, "seconds": seconds, "value": value, "held": held}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
