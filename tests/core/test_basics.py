"""The world: how it begins and ends, alone, forked, in disagreement and by an error."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import sparkvod
from sparkvod.core import basics
from sparkvod.errors import HorovodInternalError, NotInitializedError, PeerLostError
from sparkvod.launch.context import WorldContext, use


@pytest.fixture(autouse=True)
def no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SPARKVOD_RANK", "SPARKVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_messages_of_the_start() -> None:
    message = basics._pack("1.2.3", b"secret", b"endpoint\0bytes")
    assert basics._unpack(message) == ("1.2.3", b"secret", b"endpoint\0bytes")
    assert basics._unpack(basics._pack("", b"", b"")) == ("", b"", b"")
    with pytest.raises(ValueError, match=r"rank 0: 1\.0, rank 1: 1\.1"):
        basics._check_versions(["1.0", "1.1"])


def test_alone_leaves_nothing_behind() -> None:
    basics.init()
    basics.shutdown()
    descriptors, threads = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    for _ in range(5):
        basics.init()
        assert (basics.rank(), basics.size()) == (0, 1)
        basics.shutdown()
    assert os.listdir("/proc/self/task") == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_memory_that_outlives_its_engine_keeps_no_descriptor() -> None:
    basics.init()
    basics.shutdown()
    descriptors = len(os.listdir("/proc/self/fd"))
    basics.init()
    memory = basics.engine().allocate(1 << 20)
    basics.shutdown()
    view = memoryview(memory)
    view[:] = bytes([7]) * len(view)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert view[-1] == 7


def test_stats_say_what_carried_a_collective() -> None:
    with pytest.raises(NotInitializedError):
        basics.stats()
    basics.init()
    memory = basics.engine().allocate(8)
    handle = basics.engine().allreduce("x", memory.address, memory.address, 2, 8, 1)
    basics.engine().wait(handle)
    assert basics.stats()["collectives"] == {"allreduce/none/alone": {"calls": 1, "tensors": 1, "bytes": 8}}
    assert basics.stats()["cache_misses"] == 1
    basics.shutdown()


def test_a_start_that_fails_leaves_nothing_behind() -> None:
    def broken(_: bytes) -> list[bytes]:
        raise RuntimeError("the gatherer is broken")

    basics.init()
    basics.shutdown()
    descriptors, threads = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    with use(WorldContext(0, 1, broken)), pytest.raises(RuntimeError, match="broken"):
        basics.init()
    assert not basics.is_initialized()
    assert os.listdir("/proc/self/task") == threads
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    basics.init()
    basics.shutdown()


def test_a_misspelt_knob_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SPARKVOD_COLECTIVE_TIMEOUT", "1")
    with caplog.at_level("WARNING", logger="sparkvod"):
        basics.init()
    basics.shutdown()
    assert caplog.messages == [
        "SPARKVOD_COLECTIVE_TIMEOUT was found, which is no knob; if SPARKVOD_COLLECTIVE_TIMEOUT is meant, correct it"
    ]


def test_the_end_of_a_launched_function_ends_the_world() -> None:
    with use(WorldContext(0, 1, lambda data: [data])):
        basics.init()
    assert not basics.is_initialized()


def test_init_from_many_threads_makes_one_world() -> None:
    barrier = threading.Barrier(8)

    def join(_: int) -> int:
        barrier.wait()
        basics.init()
        return basics.generation()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(join, range(8)))) == 1
    basics.shutdown()


def test_names() -> None:
    basics.init()
    world = basics.world()
    assert [world.new_name("op") for _ in range(2)] == ["op.noname.0", "op.noname.1"]
    first, second = world.borrow_name("op"), world.borrow_name("op")
    assert first != second
    world.return_name("op", first)
    assert world.borrow_name("op") == first
    basics.shutdown()
    basics.init()
    assert basics.world().new_name("op") == "op.noname.0"
    basics.shutdown()


def test_a_forked_process_knows_its_rank_and_does_not_communicate() -> None:
    basics.init()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rank = basics.rank()
            try:
                basics.engine()
                answer = f"rank {rank}: an engine"
            except NotInitializedError:
                answer = f"rank {rank}: no engine"
            basics.shutdown()
            os.write(writer, answer.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"rank 0: no engine"
    assert os.waitpid(child, 0)[1] == 0
    assert basics.engine() is not None
    basics.shutdown()


def _fail_on_rank_1() -> tuple[float, str]:
    from sparkvod.core import objects
    from sparkvod.launch import context

    basics.init()
    rank = basics.rank()
    begun = time.monotonic()
    if rank == 1:
        # As a launcher does when its function raises; here the function goes on, so that nobody ends the others.
        context.run_exit_hooks(KeyError("the mistake of rank 1"))
        return 0.0, ""
    with pytest.raises(PeerLostError) as caught:
        objects.allgather_object(None)
    return time.monotonic() - begun, str(caught.value)


@pytest.mark.timeout(60)
def test_an_error_on_one_rank_fails_the_others_at_once_and_says_why() -> None:
    results = sparkvod.run_local(_fail_on_rank_1, np=3, verbose=0, timeout=50)
    for rank in (0, 2):
        seconds, words = results[rank]
        assert seconds < 2
        assert "rank 1 raised KeyError: 'the mistake of rank 1'" in words


def _join_again_after_a_failure() -> int:
    from sparkvod.core import objects

    basics.init()
    if basics.rank() == 1:
        basics.engine().abort("a test")
    with pytest.raises(HorovodInternalError):
        objects.allgather_object(None)
    basics.init()
    return sum(objects.allgather_object(basics.rank()))


@pytest.mark.timeout(60)
def test_init_after_a_failure_makes_a_new_world() -> None:
    assert sparkvod.run_local(_join_again_after_a_failure, np=3, verbose=0, timeout=50) == [3, 3, 3]
