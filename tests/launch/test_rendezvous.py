from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from sparkvod.errors import CollectiveTimeoutError, LaunchError
from sparkvod.launch import rendezvous
from sparkvod.launch.rendezvous import MAX_BYTES, Rendezvous
from tests.launch.worlds import free_port, together

pytestmark = pytest.mark.timeout(60)
KEY = b"a key that only the ranks know"


def ranks(size: int, timeout: float = 20, port: int | None = None, key: bytes = KEY) -> list[Rendezvous]:
    address = ("127.0.0.1", port or free_port())
    return [Rendezvous(rank, size, address, key, timeout) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_everybody_gets_everybodys_bytes(size: int) -> None:
    data = [b"x" * rank * 1000 for rank in range(size)]
    world = ranks(size)
    assert together([lambda r=r: world[r](data[r]) for r in range(size)]) == [data] * size


def test_it_may_be_repeated_and_leaves_the_port_free() -> None:
    world = ranks(3)

    def thrice(rank: int) -> list[list[bytes]]:
        return [world[rank](b"%d/%d" % (rank, n)) for n in range(3)]

    expected = [[b"%d/%d" % (rank, n) for rank in range(3)] for n in range(3)]
    assert together([lambda r=r: thrice(r) for r in range(3)]) == [expected] * 3
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(world[0].address)


def test_the_limit_is_carried_and_more_is_refused() -> None:
    world = ranks(2)
    data = os.urandom(MAX_BYTES)
    assert together([lambda r=r: world[r](data) for r in range(2)]) == [[data, data]] * 2
    with pytest.raises(ValueError, match=f"{MAX_BYTES + 1} bytes were given"):
        world[0](data + b"x")


def test_ranks_may_come_before_rank_0() -> None:
    world = ranks(2)

    def late() -> list[bytes]:
        time.sleep(0.5)
        return world[0](b"a")

    assert together([late, lambda: world[1](b"b")]) == [[b"a", b"b"]] * 2


def test_strangers_are_dropped_and_do_not_hold_up_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_SECONDS", 0.3)
    world = ranks(2)
    strangers = [socket.socket() for _ in range(4)]

    def rank_1() -> list[bytes]:
        time.sleep(0.3)
        for stranger in strangers:
            stranger.connect(world[0].address)
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[2].sendall(os.urandom(100_000))
        strangers[3].close()
        time.sleep(0.8)
        return world[1](b"b")

    assert together([lambda: world[0](b"a"), rank_1]) == [[b"a", b"b"]] * 2
    for stranger in strangers:
        stranger.close()
    assert "it does not know the secret" in caplog.text
    assert "it did not finish the handshake in time" in caplog.text


def test_a_rank_with_another_key_is_dropped() -> None:
    port = free_port()
    world = ranks(2, timeout=1.0, port=port)
    other = ranks(2, timeout=1.0, port=port, key=b"another key, of another job")[1]
    outcomes = together([lambda: world[0](b"a"), lambda: other(b"b")])
    assert isinstance(outcomes[0], CollectiveTimeoutError)
    assert "rank 1 of 2 had not come" in str(outcomes[0])
    assert isinstance(outcomes[1], CollectiveTimeoutError)
    assert "rank 0 was expected to listen there with the same secret" in str(outcomes[1])


def test_a_rank_of_an_earlier_world_with_the_same_key_stays_out(caplog: pytest.LogCaptureFixture) -> None:
    """It was in a gather of its own world, and keeps retrying while another world meets at the same address."""
    port = free_port()
    earlier, world = ranks(2, port=port), ranks(2, port=port)
    together([lambda r=r: earlier[r](b"%d of the earlier world" % r) for r in range(2)])
    over = threading.Event()

    def retry() -> None:
        while not over.is_set():
            try:  # sooner than the world's own rank 1, and in the world's second gather too
                earlier[1]._exchange(
                    socket.create_connection(world[0].address, timeout=1), b"wrong", time.monotonic() + 0.2
                )
                raise AssertionError("a rank of an earlier world was let in")
            except (OSError, EOFError):
                time.sleep(0.01)

    def rank_1() -> list[list[bytes]]:
        time.sleep(0.3)
        first = world[1](b"b")
        time.sleep(0.3)
        return [first, world[1](b"b")]

    def old() -> None:
        try:
            retry()
        finally:
            over.set()

    thread = threading.Thread(target=old)
    thread.start()
    outcomes = together([lambda: [world[0](b"a"), world[0](b"a")], rank_1])
    over.set()
    thread.join(10)
    assert outcomes == [[[b"a", b"b"]] * 2] * 2
    assert "a process of an earlier attempt" in caplog.text


def test_a_listener_that_does_not_know_the_key_gets_nothing() -> None:
    """It answers like rank 0 but cannot prove the key: the rank sends it no payload."""
    got = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            server.settimeout(3)
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SPKVRDV2" + os.urandom(32))
                connection.settimeout(0.5)
                got.extend(connection.recv(4096))
                connection.sendall(os.urandom(32))
                try:
                    got.extend(connection.recv(4096))
                except OSError:
                    return

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(CollectiveTimeoutError):
            ranks(2, timeout=0.8, port=server.getsockname()[1])[1](b"the payload")
        thread.join(10)
    assert got
    assert b"the payload" not in got


def test_missing_ranks_are_named_to_everybody() -> None:
    world = ranks(4, timeout=0.7)
    outcomes = together([lambda r=r: world[r](b"") for r in (0, 2)])
    assert all("ranks 1,3 of 4 had not come" in str(e) for e in outcomes), outcomes
    assert [type(e) for e in outcomes] == [CollectiveTimeoutError] * 2


def test_two_processes_with_one_rank_end_the_wait_at_once() -> None:
    port = free_port()
    world, twin = ranks(3, port=port), ranks(3, port=port)[1]
    began = time.monotonic()
    outcomes = together([lambda: world[0](b""), lambda: world[1](b""), lambda: twin(b"")])
    assert all(isinstance(e, LaunchError) and "two processes claim rank 1" in str(e) for e in outcomes), outcomes
    assert time.monotonic() - began < 10


def test_worlds_of_unequal_size_are_told() -> None:
    port = free_port()
    a, b = ranks(2, port=port)[0], ranks(3, port=port)[1]
    for error in together([lambda: a(b""), lambda: b(b"")]):
        assert isinstance(error, LaunchError)
        assert "rank 1 says that the world has 3 ranks, rank 0 says 2" in str(error)


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen on the rendezvous 127.0.0.1:{port}.*choose another"):
            ranks(2, port=port)[0](b"")


def test_a_rank_that_goes_after_its_payload_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 0.0)
    world = ranks(3, timeout=10)

    def goes() -> list[bytes]:
        with pytest.raises(CollectiveTimeoutError):
            Rendezvous(1, 3, world[0].address, KEY, 0.5)(b"old")
        return world[1](b"new")

    def waits() -> list[bytes]:
        time.sleep(1.2)
        return world[2](b"c")

    assert together([lambda: world[0](b"a"), goes, waits]) == [[b"a", b"new", b"c"]] * 3
