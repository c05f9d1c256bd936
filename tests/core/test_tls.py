"""Connections between ranks that are encrypted: what of the ranks' bytes is seen on the way, and what a world says."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparkvod
from sparkvod import config
from sparkvod._native import Engine
from sparkvod.core import basics, collectives, objects
from sparkvod.core.handles import Pending
from sparkvod.errors import CollectiveTimeoutError
from tests.core.test_survival import _come_and_go

SECRET = b"secret of a test, long enough to be one"
OPTIONS = {"transport": "tcp", "address": "127.0.0.1", "start_timeout": 20.0}
FLOAT32, SUM = 8, 1
NAME = "the name of a tensor"


def _can_encrypt() -> str:
    engine = Engine(config.engine_config(tls=True, address="127.0.0.1"))
    try:
        engine.listen()
    except ValueError as error:
        return str(error)
    finally:
        engine.shutdown()
    return ""


pytestmark = pytest.mark.skipif(bool(_can_encrypt()), reason=_can_encrypt() or "it is encrypted")


class Tap:
    """Stands between a rank that connects and the port of another, passes on their bytes and keeps them."""

    def __init__(self, port: int) -> None:
        self.heard, self._target, self._threads = bytearray(), port, list[threading.Thread]()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Tap:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _start(self, function: Any, *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target), 10)
                self._ends += [near, far]
                self._start(self._carry, near, far)
                self._start(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _port(endpoint: bytes) -> int:
    # After the magic there are eight texts, then the port.
    at = 4
    for _ in range(8):
        at += 4 + struct.unpack_from("<I", endpoint, at)[0]
    return int(struct.unpack_from("<i", endpoint, at)[0])


@contextlib.contextmanager
def _pair(tls: bool) -> Iterator[tuple[list[Engine], bytearray]]:
    """Yields two connected engines of this process, and what goes over the wire between them."""
    engines = [Engine(config.engine_config(tls=tls, **OPTIONS)) for _ in range(2)]
    try:
        endpoints = [engine.listen() for engine in engines]
        port = _port(endpoints[0])
        with Tap(port) as tap:
            # Rank 1 connects to rank 0, by what both are given.
            told, known = struct.pack("<i", tap.port), struct.pack("<i", port)
            assert endpoints[0].count(known) == 1
            detour = [endpoints[0].replace(known, told), endpoints[1]]
            other = threading.Thread(target=engines[1].connect, args=(1, detour, SECRET))
            other.start()
            engines[0].connect(0, detour, SECRET)
            other.join(20)
            yield engines, tap.heard
            ends = [threading.Thread(target=engine.shutdown) for engine in engines]
            for end in ends:
                end.start()
            for end in ends:
                end.join(20)
    finally:
        for engine in engines:
            engine.shutdown()


def _sum(engines: list[Engine], values: list[bytes]) -> list[bytes]:
    """Sums the ranks' float32 numbers."""
    memories = [engine.allocate(len(value)) for engine, value in zip(engines, values, strict=True)]
    for memory, value in zip(memories, values, strict=True):
        memoryview(memory).cast("B")[:] = value
    handles = [
        engine.allreduce(NAME, memory.address, memory.address, memory.nbytes // 4, FLOAT32, SUM)
        for engine, memory in zip(engines, memories, strict=True)
    ]
    for engine, handle in zip(engines, handles, strict=True):
        engine.wait(handle, 20.0)
        engine.release(handle)
    return [bytes(memoryview(memory).cast("B")) for memory in memories]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("numbers", [100, 200000])
def test_what_the_wire_carries(tls: bool, numbers: int, no_leaks: None) -> None:
    """Plain bytes of tensors, names and causes are on the wire without the knob, and not with it."""
    word = struct.pack("<4f", 1.25, -7.5, 1e10, 3.0)
    values = [word * (numbers // 4), bytes(numbers * 4)]
    with _pair(tls) as (engines, heard):
        assert _sum(engines, values) == [values[0]] * 2
        assert [key.split("/")[1] for key in engines[0].stats()["collectives"]] == ["tls" if tls else "tcp"]
        engines[1].abort("a word about private things")
    for plain in (word, NAME.encode(), b"a word about private things"):
        assert (plain in heard) is not tls, plain
    assert len(heard) > len(values[0])


def _all_collectives() -> list[Any]:
    basics.init()
    engine, rank, size = basics.engine(), basics.rank(), basics.size()
    count = 3 * 4000
    memory = engine.allocate(count * 4)
    view = memoryview(memory).cast("f")
    for i in range(count):
        view[i] = i % 100 + rank
    Pending(engine, engine.allreduce("a", memory.address, memory.address, count, FLOAT32, SUM), None, memory).wait()
    assert all(view[i] == size * (i % 100) + 3 for i in range(count))
    view[0] = float(rank)
    Pending(engine, engine.broadcast("b", memory.address, memory.address, count, FLOAT32, 2), None, memory).wait()
    assert view[0] == 2.0
    collectives.barrier("c")
    gathered = objects.allgather_object({"rank": rank, "text": "x" * 100000 * rank})
    ways = sorted({key.split("/")[1] for key in basics.stats()["collectives"]})
    basics.shutdown()
    return [[len(found["text"]) for found in gathered], ways]


@pytest.mark.timeout(60)
def test_a_world_of_processes_over_tls(no_leaks: None) -> None:
    env = {"SPARKVOD_TRANSPORT": "tcp", "SPARKVOD_TLS": "1"}
    found = sparkvod.run_local(_all_collectives, np=3, env=env, verbose=0, timeout=50)
    assert [sizes for sizes, _ in found] == [[0, 100000, 200000]] * 3
    assert all("tls" in ways and "tcp" not in ways for _, ways in found), found


@pytest.mark.timeout(300)
def test_encrypted_worlds_come_and_go_without_a_trace(full: bool, no_leaks: None) -> None:
    env = {"SPARKVOD_TRANSPORT": "tcp", "SPARKVOD_TLS": "1"}
    times = 1000 if full else 60
    for rank in sparkvod.run_local(_come_and_go, (times,), np=2, env=env, verbose=0, timeout=280):
        assert rank["first"] == rank["last"], rank  # threads, descriptors, segments
        assert rank["grown"] < 4 << 20, rank


@pytest.mark.timeout(60)
def test_a_mixture_names_the_ranks_and_a_wrong_secret_the_rank() -> None:
    for mixed in (True, False):
        engines = [
            Engine(config.engine_config(tls=rank == 0 or not mixed, **{**OPTIONS, "start_timeout": 0.5}))
            for rank in range(2)
        ]
        errors: list[BaseException] = []

        def join(rank: int) -> None:
            try:
                engines[rank].connect(rank, endpoints, SECRET if mixed or rank == 0 else b"another")  # noqa: B023
            except Exception as error:
                errors.append(error)  # noqa: B023

        endpoints = [engine.listen() for engine in engines]
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for engine in engines:
            engine.shutdown()
        assert len(errors) == 2
        for error in errors:
            if mixed:
                assert isinstance(error, ValueError)
                assert "SPARKVOD_TLS is " in str(error)
                assert "set one value on all ranks" in str(error)
            else:
                assert isinstance(error, CollectiveTimeoutError)
                assert re.search(
                    r"rank (0 could not connect .*: rank 1|1 could not connect .*: rank 0) on ", str(error)
                )


# ---- an impostor ----------------------------------------------------------------------------------------------------

# The messages by which both ends prove the secret, in their order: who sends them, and their bytes.
PROOF = (("server", 8 + 32), ("client", 32 + 9 + 32), ("server", 32))


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise ConnectionError("it was closed")
        data += more
    return data


def _impersonate(listener: socket.socket, target: int, certificate: ssl.SSLContext, outcome: list[str]) -> None:
    """Passes the proof of the secret on, then says to be the server, by a certificate in place of the key."""
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            near, _ = listener.accept()
            near.settimeout(10)
            with near, socket.create_connection(("127.0.0.1", target), 10) as far:
                try:
                    for sender, count in PROOF:
                        source, sink = (far, near) if sender == "server" else (near, far)
                        sink.sendall(_exactly(source, count))
                    with certificate.wrap_socket(near, server_side=True) as secure:
                        secure.recv(1)
                    outcome.append("believed")
                except OSError as error:
                    outcome.append(str(error))


@pytest.mark.timeout(60)
def test_a_certificate_is_no_key(tmp_path: Path, no_leaks: None) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl was found, which makes the certificate")
    key, made = tmp_path / "key", tmp_path / "certificate"
    how = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=rank0", "-days", "2", "-keyout", str(key), "-out", str(made)]
    subprocess.run([openssl, "req", "-x509", *how], check=True, capture_output=True, timeout=30)
    certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.load_cert_chain(made, key)

    options = {**OPTIONS, "start_timeout": 1.0, "log_level": "error"}
    engines = [Engine(config.engine_config(tls=True, **options)) for _ in range(2)]
    endpoints = [engine.listen() for engine in engines]
    port, outcome, errors = _port(endpoints[0]), list[str](), list[str]()

    def join(rank: int, endpoints: list[bytes]) -> None:
        try:
            engines[rank].connect(rank, endpoints, SECRET)
        except CollectiveTimeoutError as error:
            errors.append(str(error))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        known, told = struct.pack("<i", port), struct.pack("<i", listener.getsockname()[1])
        detour = [endpoints[0].replace(known, told), endpoints[1]]
        impostor = threading.Thread(target=_impersonate, args=(listener, port, certificate, outcome))
        ranks = [threading.Thread(target=join, args=(rank, detour)) for rank in range(2)]
        for thread in (impostor, *ranks):
            thread.start()
        for thread in ranks:
            thread.join(20)
        listener.shutdown(socket.SHUT_RDWR)
        impostor.join(20)
    for engine in engines:
        engine.shutdown()
    assert len(errors) == 2
    assert any("could not be encrypted" in error and "certificate" in error for error in errors), errors
    assert outcome
    assert "believed" not in outcome
