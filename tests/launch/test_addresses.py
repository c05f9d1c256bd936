"""Where a rank listens: the knobs ``address`` and ``port_range``, IPv6, interfaces and networks by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkvod import run_local
from sparkvod.errors import WorkerError
from tests.launch.worlds import free_port, scripts

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_leaks")]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")


def listen_and_sum() -> tuple[list[tuple[str, int]], list[str], float]:
    """Returns where this rank listened, the addresses of its connections in the end, and the sum of all ranks."""
    import psutil

    from sparkvod.core import basics, objects
    from sparkvod.launch import context

    world = context.current()
    assert world is not None
    gather, listening = world.allgather, []

    def look(data: bytes) -> list[bytes]:
        for found in psutil.Process().net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN:
                listening.append((found.laddr.ip, found.laddr.port))
        return gather(data)

    object.__setattr__(world, "allgather", look)
    basics.init()
    total = sum(objects.allgather_object(basics.rank() + 1.0))
    connections = psutil.Process().net_connections("tcp")
    used = sorted({c.raddr.ip for c in connections if c.status == psutil.CONN_ESTABLISHED})
    left = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    objects.allgather_object(None)  # nobody leaves before everybody has looked
    assert not left, f"ports stay open: {left}"
    return listening, used, total


def world(**knobs: str) -> list[Any]:
    env = {"SPARKVOD_TRANSPORT": "tcp", "SPARKVOD_START_TIMEOUT": "30"}
    env |= {f"SPARKVOD_{name.upper()}": value for name, value in knobs.items()}
    return run_local(listen_and_sum, np=2, env=env, verbose=0)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", None),
        ("lo", "127.0.0.1"),
        ("127.0.0.0/8", "127.0.0.1"),
        pytest.param("::1", "::1", marks=needs_ipv6),
        pytest.param("::1/128", "::1", marks=needs_ipv6),
    ],
)
def test_a_rank_listens_where_it_is_told_to(
    address: str, found: str | None, leave_to_full: Callable[[str], None]
) -> None:
    if address in ("localhost", "127.0.0.0/8", "::1/128"):
        leave_to_full("its neighbours show it")
    for listening, used, total in world(address=address):
        assert len(listening) == 1
        assert found is None or listening[0][0] == found
        assert found is None or used == [found]
        assert total == 3.0


def test_nothing_said_means_every_interface() -> None:
    for listening, _, total in world():
        assert [ip for ip, _ in listening] == ["::" if has_ipv6() else "0.0.0.0"]
        assert total == 3.0


def test_ports_are_of_the_range() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        ports = [listening[0][1] for listening, _, _ in world(address="127.0.0.1", port_range=f"{first}-{first + 40}")]
        assert all(first < port <= first + 40 for port in ports)
        assert ports[0] != ports[1]
        with pytest.raises(WorkerError, match=f"no free port in SPARKVOD_PORT_RANGE='{first}-{first}'; widen it"):
            world(address="127.0.0.1", port_range=f"{first}-{first}")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"address": "198.51.100.0/24"}, "no address in that network; its interfaces are .*lo with 127.0.0.1"),
        ({"address": "127.0.0.0/40"}, "SPARKVOD_ADDRESS='127.0.0.0/40' was found, a network such as 10.0.0.0/8"),
        ({"address": "198.51.100.7"}, "198.51.100.7"),
        ({"port_range": "90-80"}, "SPARKVOD_PORT_RANGE"),
        ({"port_range": "x"}, "SPARKVOD_PORT_RANGE"),
    ],
)
def test_what_cannot_be_listened_on(knobs: dict[str, str], said: str) -> None:
    from sparkvod import config
    from sparkvod._native import Engine

    engine = Engine(config.engine_config(**knobs))
    try:
        with pytest.raises((ValueError, RuntimeError, OSError), match=said):
            engine.listen()
    finally:
        engine.shutdown()


SCRIPT = """
from sparkvod.core import basics, objects
basics.init()
print(basics.rank(), basics.size(), sum(objects.allgather_object(basics.rank() + 1.0)))
"""


@needs_ipv6
def test_a_world_of_the_environment_over_ipv6(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(os.urandom(16).hex())
    secret.chmod(0o600)
    told = {
        "SPARKVOD_RENDEZVOUS": f"[::1]:{free_port()}",
        "SPARKVOD_SECRET_FILE": str(secret),
        "SPARKVOD_TRANSPORT": "tcp",
        "SPARKVOD_ADDRESS": "::1",
    }
    with scripts(["-c", SCRIPT], 2, **told) as ranks:
        said = [rank.communicate(timeout=70) for rank in ranks]
    assert [out.split() for out, _ in said] == [["0", "2", "3.0"], ["1", "2", "3.0"]], said
