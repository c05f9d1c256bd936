"""A fit on a standalone cluster of two hosts, of which one is lost: how soon the other rank and ``fit`` know.

Master, driver and a Worker are on north, another Worker is on south; the hosts are network namespaces.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import namespaces, servers
from tests.clusters.namespaces import HOSTS, Hosts
from tests.faults import faults

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("no_leaks")]
SCRIPT = Path(__file__).with_name("lost_host_script.py")
KNOB = 3.0  # SPARKVOD_COLLECTIVE_TIMEOUT, seconds
NAMES = {
    "kill": "all of a host is killed (SIGKILL)",
    "power": f"a host vanishes (time-out {KNOB:g} s)",
    "cut": f"a host is cut off (time-out {KNOB:g} s)",
}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with namespaces.hosts(4) as made:
        yield made


def lose(hosts: Hosts, how: str) -> None:
    """Takes south away: its processes, its cable, or first the cable, so that nobody hears the processes' end."""
    if how != "kill":
        hosts.cut()
    if how != "cut":
        hosts.kill(1)


def outcome(hosts: Hosts, folder: Path, how: str) -> dict[str, Any]:
    """Fits until south is lost; returns what the driver says of it, and ``at``, when it happened."""
    more = {"PYTHONPATH": str(servers.ROOT), "PYSPARK_PYTHON": sys.executable}
    places = [servers.Place(hosts.addresses[host], hosts.prefix(host), more) for host in (0, 1)]
    with servers.standalone(folder / "cluster", places) as url:
        command = [sys.executable, str(SCRIPT), str(folder), url, hosts.addresses[0], f"{KNOB:g}"]
        driver = subprocess.Popen(
            [*places[0].prefix, *command],
            cwd=folder,
            env=places[0].environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until = time.monotonic() + 90
            while len(list(folder.glob("ready-*"))) < 2:
                assert driver.poll() is None, driver.stderr and driver.stderr.read()[-4000:]
                assert time.monotonic() < until
                time.sleep(0.02)
            time.sleep(0.3)
            at = time.time()
            lose(hosts, how)
            _, said = driver.communicate(timeout=60)
        finally:
            driver.kill()
            driver.communicate()
    assert driver.returncode == 0, said[-4000:]
    return {**json.loads((folder / "told.json").read_text()), "at": at}


@pytest.mark.parametrize("how", ["kill", "power", "cut"])
def test_a_host_is_lost(
    hosts: Hosts,
    folder: Path,
    fault_table: list[tuple[str, str, str, str]],
    leave_to_full: Callable[[str], None],
    how: str,
) -> None:
    if how != "kill":
        leave_to_full("it takes a cluster of its own")
    (mine := folder / how).mkdir()
    told = outcome(hosts, mine, how)
    ranks = {path.read_text(): int(path.name[6:]) for path in mine.glob("ready-*")}
    assert sorted(ranks) == list(HOSTS)
    kept, lost = (ranks[host] for host in HOSTS)
    noticed = faults.errors(mine)[kept]
    other, fit = noticed["time"] - told["at"], told["time"] - told["at"]
    fault_table.append((NAMES[how], f"{other:.2f}", f"{fit:.2f}", told["error"].splitlines()[0]))
    knob = 0 if how == "kill" else KNOB
    assert other < 1 + 2 * knob
    assert fit < 3 + 2 * knob
    assert f"rank {lost} on south" in noticed["message"]
    assert told["lost_peer"]
    assert told["left"] == [], "processes of the run are left on the host that was not lost"
    if how == "cut":  # south is alive, shares the store, and says the same of north
        assert re.search("on (north|south) waited .* on (?!\\1)(north|south)", told["error"])
        return
    assert (told["rank"], told["host"]) == (lost, "south")
    assert told["error"].startswith(f"rank {lost} on south was ")
