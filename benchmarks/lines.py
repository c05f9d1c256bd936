"""Two hosts joined by a long cable: network namespaces, and ``sparkvod_bench cable`` between them.

They need root, the command ip (Debian: iproute2) and ``/dev/net/tun``. ``tc``'s netem would do the same, where the
kernel has it; the cable does it everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import program

HOSTS = ("north", "south")
ADDRESSES = ("10.213.8.1", "10.213.8.2")
INTERFACE = "cable"
MTU = 1500
MEGABITS = 1000
# Of a packet: IPv4's and TCP's headers with time stamps. What is left is the payload's part of the rate.
HEADER_BYTES = 52
PAYLOAD_BYTES_PER_SECOND = MEGABITS * 1e6 / 8 * (MTU - HEADER_BYTES) / MTU
DEADLINE_SECONDS = 120.0


def missing() -> str | None:
    """Returns why no hosts can be made here, None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "not installed (ip of iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun"
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def cable(delay_ms: float) -> Iterator[tuple[str, str]]:
    """Makes two hosts with a cable of a delay, in each direction, and :data:`MEGABITS`; yields their namespaces."""
    names = tuple(f"svb{os.getpid()}-{host}" for host in HOSTS)
    try:
        for name in names:
            _ip("netns", "add", name)
        command = [program.build(), "cable", *names, INTERFACE, int(delay_ms * 1000), MEGABITS]
        with subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as laid:
            assert laid.stdin is not None
            assert laid.stdout is not None
            try:
                if not select.select([laid.stdout], [], [], 20)[0] or laid.stdout.readline() != b"ready\n":
                    raise RuntimeError("the cable could not be laid")
                for name, address in zip(names, ADDRESSES, strict=True):
                    _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
                    _ip("-n", name, "link", "set", INTERFACE, "mtu", str(MTU), "txqueuelen", "10000", "up")
                    _ip("-n", name, "link", "set", "lo", "up")
                yield names  # type: ignore[misc]
            finally:
                laid.stdin.close()  # which ends it
                try:
                    laid.wait(10)
                except subprocess.TimeoutExpired:
                    laid.kill()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def ranks(
    names: Sequence[str], module: str, arguments: Sequence[object], per_host: int, flat: bool = False
) -> list[Any]:
    """Runs ``python -m module`` once per rank, those of the first host first; returns what each printed as JSON.

    Args:
        names: namespaces of the hosts.
        module: joins the world of its environment.
        arguments: of the module.
        per_host: ranks on each host.
        flat: let no ranks share memory, so that all bytes go over TCP in one ring.

    Raises:
        RuntimeError: a rank failed, with its words.
    """
    with tempfile.TemporaryDirectory(prefix="sparkvod-bench-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text(os.urandom(16).hex())
        secret.chmod(0o600)
        size = per_host * len(names)
        processes = []
        for rank in range(size):
            told = {
                "PYTHONPATH": str(program.ROOT),
                "OMP_NUM_THREADS": "1",
                "SPARKVOD_RANK": str(rank),
                "SPARKVOD_SIZE": str(size),
                "SPARKVOD_RENDEZVOUS": f"{ADDRESSES[0]}:29710",
                "SPARKVOD_SECRET_FILE": str(secret),
                "SPARKVOD_START_TIMEOUT": "60",
                "SPARKVOD_COLLECTIVE_TIMEOUT": "60",
            }
            if flat:
                told.update(SPARKVOD_TRANSPORT="tcp", SPARKVOD_ALLREDUCE_ALGORITHM="ring")
            command = ["ip", "netns", "exec", names[rank // per_host], sys.executable, "-m", module]
            processes.append(
                subprocess.Popen(
                    [*command, *map(str, arguments)],
                    env={**os.environ, **told},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            results = []
            for rank, process in enumerate(processes):
                out, err = process.communicate(timeout=DEADLINE_SECONDS)
                if process.returncode != 0:
                    raise RuntimeError(f"rank {rank} of {size} failed:\n{err[-3000:]}")
                results.append(json.loads(out.splitlines()[-1]))
            return results
        finally:
            for process in processes:
                process.kill()
