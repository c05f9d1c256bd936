"""Strangers at the ports of a world over TCP, while it starts and while it trains: dropped, logged, not in the way."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sparkvod import run_local

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_leaks")]
SECONDS = 2.0
GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"\xff" * 300, b"\x80\x04\x95" + os.urandom(4000))


def train(seconds: float) -> tuple[float, int, float]:
    """Tells where this rank listens, is late, joins, sums for some seconds; returns the longest pause too."""
    import torch

    import sparkvod.torch as hvd
    from sparkvod.launch import context
    from sparkvod.observe import mailbox

    world = context.current()
    assert world is not None
    gather = world.allgather

    def slow_gather(data: bytes) -> list[bytes]:
        everybody = gather(data)
        mailbox.current().post("endpoints", messages=[message.hex() for message in everybody])
        time.sleep(seconds)  # the ports are open, the ranks do not connect yet
        return everybody

    object.__setattr__(world, "allgather", slow_gather)
    hvd.init()
    until, steps, pause, last = time.monotonic() + seconds, 0, 0.0, time.monotonic()
    value = torch.ones(5000)
    while float(hvd.allreduce(torch.tensor([float(time.monotonic() > until)]), op=hvd.Sum)[0]) == 0:
        value = hvd.allreduce(value, name="value")  # the mean of ones
        steps += 1
        pause, last = max(pause, time.monotonic() - last), time.monotonic()
    hvd.shutdown()
    return float(value.sum()), steps, pause


class Strangers:
    """Knock at all ports that may be listened on, in every way, until they are stopped."""

    def __init__(self, ports: range) -> None:
        self.ports, self.knocks, self.stop = ports, Counter[str](), threading.Event()
        self._held: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._run, args=(how,)) for how in ("scan", "garbage", "slow")]

    def __enter__(self) -> Strangers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        for sock in self._held:
            sock.close()

    def _run(self, how: str) -> None:
        while not self.stop.is_set():
            for port in self.ports:
                with contextlib.suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", port), 1)
                    self.knocks[how] += 1
                    if how == "slow" and len(self._held) < 20:
                        sock.sendall(b"\x00")
                        self._held.append(sock)
                        continue
                    with sock:
                        if how == "garbage":
                            sock.sendall(GARBAGE[self.knocks[how] % len(GARBAGE)])
            time.sleep(0.03)


def lie(endpoints: list[bytes], outcome: list[str]) -> None:
    """Tries to join as rank 1 with another secret."""
    from sparkvod import config
    from sparkvod._native import Engine

    engine = Engine(config.engine_config(transport="tcp", address="127.0.0.1", start_timeout=3.0))
    try:
        own = engine.listen()
        engine.connect(1, [endpoints[0], own], b"another secret")
        outcome.append("joined")
    except Exception as e:
        outcome.append(f"{type(e).__name__}: {e}")
    finally:
        engine.shutdown()


def zombie(port: int) -> Callable[[list[str]], None]:
    """Returns rank 1 of an earlier attempt, which still looks for its rank 0 where another one listens now."""
    from sparkvod import config
    from sparkvod._native import Engine

    options = {"transport": "tcp", "address": "127.0.0.1", "start_timeout": 3.0}
    gone = Engine(config.engine_config(port_range=f"{port}-{port}", **options))
    endpoint = gone.listen()
    gone.shutdown()

    def join(outcome: list[str]) -> None:
        engine = Engine(config.engine_config(**options))
        try:
            engine.connect(1, [endpoint, engine.listen()], b"the secret of the earlier attempt")
            outcome.append("joined")
        except Exception as e:
            outcome.append(f"{type(e).__name__}: {e}")
        finally:
            engine.shutdown()

    return join


def free_ports(count: int) -> range:
    """Returns a range of ports, none of which is in use."""
    for first in range(21000 + os.getpid() % 4000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return range(first, first + count)
    raise AssertionError("no free ports were found")


def test_strangers_are_dropped_and_training_goes_on(
    capfd: pytest.CaptureFixture[str], fault_table: list[tuple[str, str, str, str]]
) -> None:
    from sparkvod.core.basics import _unpack

    ports, liars = free_ports(6), list[threading.Thread]()
    false, late = list[str](), list[str]()
    rise = zombie(ports[0])

    def heard(event: dict[str, Any]) -> None:
        if event["kind"] == "endpoints" and not liars:
            endpoints = [_unpack(bytes.fromhex(message))[2] for message in event["messages"]]
            liars.append(threading.Thread(target=lie, args=(endpoints, false)))
            liars.append(threading.Thread(target=rise, args=(late,)))
            for liar in liars:
                liar.start()

    env = {
        "SPARKVOD_TRANSPORT": "tcp",
        "SPARKVOD_ADDRESS": "127.0.0.1",
        "SPARKVOD_PORT_RANGE": f"{ports[0]}-{ports[-1]}",
        "SPARKVOD_LOG_LEVEL": "warning",
    }
    with Strangers(ports) as strangers:
        results = run_local(train, (SECONDS,), np=2, env=env, timeout=60, on_event=heard)
    for liar in liars:
        liar.join(20)
        assert not liar.is_alive()
    assert [value for value, _, _ in results] == [5000.0, 5000.0]
    assert all(steps > 10 for _, steps, _ in results)
    assert min(strangers.knocks[how] for how in ("scan", "garbage", "slow")) > 5, strangers.knocks
    for outcome in (false, late):
        assert len(outcome) == 1
        assert "CollectiveTimeoutError" in outcome[0] or "PeerLostError" in outcome[0], outcome
    said = capfd.readouterr()
    assert "dropped a stranger's connection" in said.out + said.err
    _, steps, pause = results[0]
    went_on = f"dropped; {steps} sums in {SECONDS:g} s went on, the longest pause was {1e3 * pause:.1f} ms"
    for how, name in (("garbage", "garbage"), ("scan", "a port scanner"), ("slow", "a slow connector")):
        fault_table.append((f"{name}, {strangers.knocks[how]} times", "-", "-", went_on))
    fault_table.append(("a rank with another secret", "-", "-", f"dropped; it got {false[0]}"))
    fault_table.append(("a zombie of an earlier attempt", "-", "-", f"dropped; it got {late[0]}"))
