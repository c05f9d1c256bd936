"""One rank on one "host" of ``test_namespaces.py``: sums, gathers, broadcasts, then loses a peer if it is told to."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

CLONE_NEWUTS = 0x04000000
LARGE = 2_000_000  # elements: 8 MB


def become(host: str) -> None:
    """Gives this process a host name of its own, as a container has."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(host)


def sent(interface: str) -> int:
    """Returns the bytes that left through an interface of this namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise LookupError(interface)


def checks(torch: Any, hvd: Any) -> list[str]:
    """Returns what came out wrong."""
    rank, size = hvd.rank(), hvd.size()
    total, wrong = size * (size + 1) // 2, []
    for count in (0, 1, 1000, LARGE + 1):
        if not bool((hvd.allreduce(torch.full((count,), float(rank + 1)), op=hvd.Sum) == total).all()):
            wrong.append(f"allreduce of {count}")
    own = hvd.empty(500_000).fill_(rank + 1)
    if not bool((hvd.allreduce_(own, op=hvd.Sum) == total).all()):
        wrong.append("allreduce in engine memory")
    handles = [hvd.allreduce_async(torch.full((100 + i,), float(i)), op=hvd.Sum) for i in range(100)]
    if not all(bool((hvd.synchronize(handle) == i * size).all()) for i, handle in enumerate(handles)):
        wrong.append("many at once")
    gathered = hvd.allgather(torch.full((rank + 1, 3), float(rank)))
    expected = torch.cat([torch.full((r + 1, 3), float(r)) for r in range(size)])
    if not torch.equal(gathered, expected):
        wrong.append("allgather")
    for root in range(size):
        if not bool((hvd.broadcast(torch.full((100_000,), float(rank)), root) == root).all()):
            wrong.append(f"broadcast from {root}")
    if hvd.broadcast_object({"of": rank}, size - 1) != {"of": size - 1}:
        wrong.append("broadcast_object")
    return wrong


def lose(torch: Any, hvd: Any, how: str, mark: Path) -> dict[str, Any]:
    """Sums until a peer or the other host is lost; returns when and how that was noticed."""
    value, began = torch.ones(100_000), time.monotonic()
    try:
        for step in range(10**9):
            if how == "kill" and hvd.rank() == hvd.size() - 1 and step == 50:
                mark.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 20:
                (mark.parent / f"ready-{hvd.rank()}").write_text("")
            hvd.allreduce(value)
            if time.monotonic() - began > 60:
                raise TimeoutError("nothing happened")
    except hvd.HorovodInternalError as error:
        return {"time": time.time(), "kind": type(error).__name__, "message": str(error)}
    raise AssertionError("unreachable")


def main(host: str, interface: str, how: str, folder: Path) -> None:
    """Joins the world of the environment, and prints as JSON what became of it."""
    become(host)
    import torch

    import sparkvod.torch as hvd

    hvd.init()
    told: dict[str, Any] = {
        name: getattr(hvd, name)()
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
    }
    told |= {"wrong": checks(torch, hvd)}
    hvd.barrier()
    before = hvd.stats()["collectives"], sent(interface), sent("lo")
    hvd.allreduce(torch.ones(LARGE))
    hvd.barrier()
    after = hvd.stats()["collectives"], sent(interface), sent("lo")
    told["ways"] = sorted(way for way in after[0] if after[0][way] != before[0].get(way) and "allreduce" in way)
    told |= {"sent": after[1] - before[1], "sent_lo": after[2] - before[2]}
    hvd.barrier()  # nobody measures while others go on
    if how != "none":
        told["lost"] = lose(torch, hvd, how, folder / "fault")
    with contextlib.suppress(hvd.HorovodInternalError):
        hvd.shutdown()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
