"""Two hosts on one kernel: network namespaces joined by a cable of their own, two ranks on each.

Needs root and iproute2. What is made is named after this process, and goes with the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import namespace_script

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_leaks")]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(namespace_script.__file__)
HOSTS = ("north", "south")
ADDRESSES = {4: ("10.213.7.1", "10.213.7.2"), 6: ("fd00:213:7::1", "fd00:213:7::2")}
KNOB = 3.0  # SPARKVOD_COLLECTIVE_TIMEOUT, seconds
BYTES = 4 * namespace_script.LARGE


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Hosts:
    """Two network namespaces and the cable between them."""

    def __init__(self, family: int) -> None:
        self.addresses = ADDRESSES[family]
        self.names = [f"sv{os.getpid()}-{host}" for host in HOSTS]
        self.interfaces = [f"sv{os.getpid() % 10**7}n", f"sv{os.getpid() % 10**7}s"]
        self._family = family

    def __str__(self) -> str:
        return f"IPv{self._family}"

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            ip("link", "set", interface, "netns", name)
            if self._family == 6:
                ip("-n", name, "address", "add", f"{address}/64", "dev", interface, "nodad")
            else:
                ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", interface, "up")

    def cut(self) -> None:
        """Pulls the cable."""
        ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)
        subprocess.run(["ip", "link", "delete", self.interfaces[0]], capture_output=True, timeout=20)


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip (Debian: iproute2)")
    made = Hosts(request.param)
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no network namespaces can be made here: {e.stderr.decode().strip()}")
        yield made
    finally:
        made.remove()
    left = set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
    assert not left & set(made.names)


class World:
    """Four ranks, the first two on the first host; ends them all in the end."""

    def __init__(self, hosts: Hosts, how: str, folder: Path) -> None:
        secret = folder / "secret"
        secret.write_text(os.urandom(16).hex())
        secret.chmod(0o600)
        root = hosts.addresses[0]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SPARKVOD_SIZE": "4",
            "SPARKVOD_RENDEZVOUS": f"[{root}]:29700" if ":" in root else f"{root}:29700",
            "SPARKVOD_SECRET_FILE": str(secret),
            "SPARKVOD_START_TIMEOUT": "60",
            "SPARKVOD_COLLECTIVE_TIMEOUT": f"{KNOB:g}",
        }
        self.processes = []
        for rank in range(4):
            host = rank // 2
            told = [HOSTS[host], hosts.interfaces[host], how, str(folder)]
            self.processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", hosts.names[host], sys.executable, str(SCRIPT), *told],
                    env={**environment, "SPARKVOD_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def told(self) -> list[dict[str, Any]]:
        """Returns what the ranks say, and an empty dict for one that was killed."""
        outcomes = []
        for rank, process in enumerate(self.processes):
            out, err = process.communicate(timeout=100)
            assert process.returncode in (0, -9), f"rank {rank}: {err[-3000:]}"
            outcomes.append(json.loads(out.splitlines()[-1]) if process.returncode == 0 else {})
        return outcomes


def test_hosts_are_told_apart_and_each_takes_its_own_way(hosts: Hosts, tmp_path: Path) -> None:
    with World(hosts, "none", tmp_path) as world:
        told = world.told()
    for rank, each in enumerate(told):
        assert each["wrong"] == []
        assert (each["rank"], each["size"], each["is_homogeneous"]) == (rank, 4, True)
        assert (each["local_rank"], each["local_size"]) == (rank % 2, 2)
        assert (each["cross_rank"], each["cross_size"]) == (rank // 2, 2)
        assert each["ways"] == ["allreduce/shm+tcp/hierarchical"]
        # Each host sends every byte of the tensor once over the cable; a ring of four would send one and a half.
        assert BYTES <= each["sent"] < 1.2 * BYTES
        assert each["sent_lo"] == 0  # and ranks of one host nothing over TCP


def noticed(told: list[dict[str, Any]], ranks: list[int], at: float) -> list[float]:
    return [told[rank]["lost"]["time"] - at for rank in ranks]


def seconds(times: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in times)


def test_a_killed_rank_of_the_other_host_is_named(
    hosts: Hosts, tmp_path: Path, fault_table: list[tuple[str, str, str, str]]
) -> None:
    with World(hosts, "kill", tmp_path) as world:
        told = world.told()
    at = float((tmp_path / "fault").read_text())
    assert told[3] == {}
    times = noticed(told, [0, 1, 2], at)
    fault_table.append((f"killed on another host, {hosts}", seconds(times), "-", told[0]["lost"]["message"]))
    assert max(times) < 1
    for rank in range(3):
        assert told[rank]["lost"]["kind"] == "PeerLostError"
        assert "rank 3 on south" in told[rank]["lost"]["message"]


def test_a_cable_that_is_pulled_is_noticed_in_time(
    hosts: Hosts, tmp_path: Path, fault_table: list[tuple[str, str, str, str]]
) -> None:
    with World(hosts, "cut", tmp_path) as world:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 4:
            assert time.monotonic() < until
            assert all(process.poll() is None for process in world.processes)
            time.sleep(0.05)
        at = time.time()
        hosts.cut()
        told = world.told()
    times = noticed(told, [0, 1, 2, 3], at)
    name = f"host cut off, {hosts} (time-out {KNOB:g} s)"
    fault_table.append((name, seconds(times), "-", told[0]["lost"]["message"]))
    assert max(times) < 1 + 2 * KNOB
    assert {each["lost"]["kind"] for each in told} <= {"CollectiveTimeoutError", "PeerLostError"}
    across = [re.search("on (north|south) waited .* on (?!\\1)(north|south)", each["lost"]["message"]) for each in told]
    assert any(across), [each["lost"]["message"] for each in told]
