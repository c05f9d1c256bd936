"""The engine on two hosts, which are network namespaces joined by a cable of their own: two ranks on each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import namespace_script, namespaces
from tests.clusters.namespaces import HOSTS, Hosts

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_leaks")]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(namespace_script.__file__)
KNOB = 3.0  # SPARKVOD_COLLECTIVE_TIMEOUT, seconds
SILENCE = 5.0  # SPARKVOD_HOST_TIMEOUT, seconds
BYTES = 4 * namespace_script.LARGE


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with namespaces.hosts(request.param) as made:
        yield made


class World:
    """Four ranks, the first two on the first host; ends them all in the end."""

    def __init__(self, hosts: Hosts, how: str, folder: Path, **knobs: str) -> None:
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
            **knobs,
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

    def await_ready(self, folder: Path) -> None:
        """Waits until all four ranks train."""
        until = time.monotonic() + 60
        while len(list(folder.glob("ready-*"))) < 4:
            assert time.monotonic() < until
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.05)

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
        world.await_ready(tmp_path)
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


def test_a_host_that_answers_nothing_is_lost_and_a_rank_that_is_stopped_is_not(
    tmp_path: Path, fault_table: list[tuple[str, str, str, str]]
) -> None:
    patient = {"SPARKVOD_COLLECTIVE_TIMEOUT": "300", "SPARKVOD_HOST_TIMEOUT": f"{SILENCE:g}"}
    with namespaces.hosts(4) as two, World(two, "cut", tmp_path, **patient) as world:
        world.await_ready(tmp_path)
        # Its kernel answers for it, while the others' bytes wait for room in its sockets.
        world.processes[3].send_signal(signal.SIGSTOP)
        time.sleep(SILENCE + 3)
        assert all(process.poll() is None for process in world.processes)
        world.processes[3].send_signal(signal.SIGCONT)
        time.sleep(1)
        assert all(process.poll() is None for process in world.processes)
        at = time.time()
        two.cut()
        told = world.told()
    times = noticed(told, [0, 1, 2, 3], at)
    name = f"host cut off (SPARKVOD_HOST_TIMEOUT {SILENCE:g} s)"
    fault_table.append((name, seconds(times), "-", told[0]["lost"]["message"]))
    assert min(times) > 0
    assert max(times) < SILENCE + 4
    assert {each["lost"]["kind"] for each in told} == {"PeerLostError"}
    for each in told:
        assert re.search("rank . on (north|south)", each["lost"]["message"]), each
        assert "SPARKVOD_HOST_TIMEOUT" in each["lost"]["message"]
