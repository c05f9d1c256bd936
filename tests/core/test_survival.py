"""What a world survives, and how it ends: forks, signals, exits, limits of the system, many beginnings and ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import sparkvod
from sparkvod.core import basics, collectives, handles, objects, timeline
from sparkvod.core.handles import Pending
from sparkvod.errors import CollectiveTimeoutError, HorovodInternalError, NotInitializedError
from tests.launch.worlds import scripts

ROOT = Path(__file__).resolve().parents[2]


def _allreduce(name: str, value: float = 1.0) -> float:
    engine = basics.engine()
    memory = engine.allocate(8)
    view = memoryview(memory).cast("f")
    view[0] = value
    handle = engine.allreduce(name, memory.address, memory.address, 2, 8, 1)
    Pending(engine, handle, None, memory).wait()
    return view[0]


# ---- fork -----------------------------------------------------------------------------------------------------------


def _calls_of_a_forked_process() -> dict[str, str]:
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: _allreduce("x"),
        "barrier": lambda: collectives.barrier("x"),
        "objects": lambda: objects.allgather_object(1),
        "stats": sparkvod.stats,
        "start_timeline": lambda: timeline.start_timeline("/tmp/never.json"),
        "stop_timeline": timeline.stop_timeline,
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except NotInitializedError as error:
            said[name] = str(error)
        else:
            said[name] = "nothing"
    with timeline.timeline_span("harmless"):
        said["rank"] = str(basics.rank())
    basics.init()  # does nothing
    basics.shutdown()
    return said


def _fork_in_a_rank() -> dict[str, str]:
    basics.init()
    _allreduce("before")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(_calls_of_a_forked_process()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said: dict[str, str] = json.load(pipe)
    assert os.waitpid(child, 0)[1] == 0
    # The parent's world is as it was.
    assert _allreduce("after", basics.rank() + 1.0) == 3.0
    basics.shutdown()
    return said


@pytest.mark.timeout(60)
def test_every_call_of_a_forked_process_says_why_it_cannot(no_leaks: None) -> None:
    for rank, said in enumerate(sparkvod.run_local(_fork_in_a_rank, np=2, verbose=0, timeout=50)):
        assert said.pop("rank") == str(rank)
        assert len(said) == 6
        for call, words in said.items():
            assert "forked from a rank" in words, call
            assert "do it in the rank" in words, call


# ---- waiting --------------------------------------------------------------------------------------------------------


def _end_by_a_handler(number: int, frame: object) -> None:
    sys.exit(f"ended by signal {number}")


def _wait_and_be_interrupted(number: int) -> tuple[float, str]:
    basics.init()
    _allreduce("before")
    if basics.rank() == 1:
        with pytest.raises(HorovodInternalError) as caught:
            _allreduce("nobody else's")
        return 0.0, str(caught.value)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end_by_a_handler)
    sent = [0.0]

    def send() -> None:
        sent[0] = time.monotonic()
        os.kill(os.getpid(), number)

    threading.Timer(0.3, send).start()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        _allreduce("never")
    return time.monotonic() - sent[0], ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_at_once_and_the_others_are_told(number: int) -> None:
    (seconds, _), (_, told) = sparkvod.run_local(_wait_and_be_interrupted, (number,), np=2, verbose=0, timeout=50)
    assert seconds < 1.0
    assert "rank 0" in told
    assert "interrupted" in told


def _wait_with_a_deadline() -> None:
    basics.init()
    engine = basics.engine()
    if basics.rank() == 1:
        time.sleep(0.6)
    memory = engine.allocate(8)
    handle = handles.add(
        Pending(engine, engine.allreduce("slow", memory.address, memory.address, 2, 8, 1), None, memory)
    )
    if basics.rank() == 0:
        begun = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="'slow' was not done within 0.1 s; it goes on"):
            handles.synchronize(handle, timeout=0.1)
        with pytest.raises(CollectiveTimeoutError):
            handles.synchronize(handle, timeout=0)
        assert time.monotonic() - begun < 0.5
        assert not handles.poll(handle)
    assert handles.synchronize(handle, timeout=30) is memory
    assert handles.synchronize(handle, timeout=30) is None


@pytest.mark.timeout(60)
def test_a_deadline_of_one_wait_ends_the_wait_and_not_the_collective() -> None:
    sparkvod.run_local(_wait_with_a_deadline, np=2, verbose=0, timeout=50)


# ---- exit -----------------------------------------------------------------------------------------------------------

EXIT = """
import sys, threading, time
from sparkvod.core import basics
from sparkvod.errors import HorovodInternalError
basics.init()
engine = basics.engine()
memory = engine.allocate(8)
name = "of rank 0" if basics.rank() == 0 else "of rank 1"
handle = engine.allreduce(name, memory.address, memory.address, 2, 8, 1)
if basics.rank() == 1:  # waits for what rank 0 does not submit
    try:
        engine.wait(handle)
    except HorovodInternalError as error:
        print(time.monotonic(), error)
    sys.exit()
time.sleep(0.2)
{end}
print(time.monotonic(), flush=True)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "del engine, memory",
        # A thread that waits for ever must not keep the interpreter.
        "threading.Thread(target=engine.wait, args=(handle, 600.0), daemon=True).start(); time.sleep(0.2)",
    ],
)
def test_an_interpreter_that_exits_without_shutdown_ends_what_is_in_flight(end: str) -> None:
    with scripts(["-c", EXIT.format(end=end)], 2) as ranks:
        said, complaint = ranks[0].communicate(timeout=40)
        ended = time.monotonic()
        heard, _ = ranks[1].communicate(timeout=10)
    assert ranks[0].returncode == 0, complaint
    assert "Fatal" not in complaint
    left = float(said)
    # The interpreter's own end takes a while on a busy machine.
    assert ended - left < 5
    at, words = heard.split(" ", 1)
    assert float(at) - left < 1
    assert re.search(r"rank 0 on \S+ left the world: its script ended", words)


# ---- limits of the system -------------------------------------------------------------------------------------------


def _reduce_under_limits(rank_with_limit: int) -> tuple[list[str], float]:
    from sparkvod.launch import context

    current = context.current()
    assert current is not None
    if current.rank == rank_with_limit:
        # The limit of file sizes holds for shared memory too.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    basics.init()
    value = _allreduce("x", basics.rank() + 1.0)
    ways = list(basics.stats()["collectives"])
    basics.shutdown()
    return ways, value


@pytest.mark.timeout(60)
def test_without_shared_memory_it_is_tcp_and_said(capfd: pytest.CaptureFixture[str], no_leaks: None) -> None:
    results = sparkvod.run_local(_reduce_under_limits, (1,), np=3, verbose=1, timeout=50)
    assert results == [(["allreduce/tcp/doubling"], 6.0)] * 3
    said = [line for line in capfd.readouterr().err.splitlines() if "over TCP" in line]
    assert len(said) == 1, said
    assert re.search(r"rank 1 on \S+ can share no memory \(.*File too large\)", said[0])
    assert (
        sparkvod.run_local(_reduce_under_limits, (-1,), np=2, verbose=0, timeout=50)
        == [(["allreduce/shm/one-shot"], 3.0)] * 2
    )


def _reduce_in_little_address_space() -> tuple[list[str], float]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 30)  # as `ulimit -v` sets one
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    basics.init()
    value = _allreduce("x", basics.rank() + 1.0)
    return list(basics.stats()["collectives"]), value


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("transport", "way"), [("auto", "shm/one-shot"), ("tcp", "tcp/doubling")])
def test_a_limit_of_address_space_is_no_hindrance(transport: str, way: str, no_leaks: None) -> None:
    env = {"SPARKVOD_TRANSPORT": transport}
    results = sparkvod.run_local(_reduce_in_little_address_space, np=2, env=env, verbose=0, timeout=50)
    assert results == [([f"allreduce/{way}"], 3.0)] * 2


def _leave_while_others_reduce(how: str) -> str:
    from sparkvod.launch import context

    current = context.current()
    assert current is not None
    if how == "absent" and current.rank == 1:
        # It has listened, and stands still before it connects.
        setattr(basics, "Engine", _StandsStill)  # noqa: B010 - mypy takes the other for a mistake
    basics.init()
    if current.rank == 1 and how == "shutdown":
        basics.shutdown()
        time.sleep(1)
    if current.rank != 1:
        _allreduce("grad", 1.0)
    return "returned"


class _StandsStill(basics.Engine):
    def connect(self, *args: object) -> None:
        time.sleep(60)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("return", r"ShutDownError: rank 1 on \S+ left the world: its function returned"),
        ("shutdown", r"ShutDownError: rank 1 on \S+ left the world: it called shutdown\(\)"),
        ("absent", "missing: rank 1 on"),
    ],
)
def test_the_rank_that_left_or_stood_still_is_named(how: str, words: str) -> None:
    env = {"SPARKVOD_START_TIMEOUT": "2"}
    with pytest.raises(sparkvod.errors.WorkerError, match=words) as caught:
        sparkvod.run_local(_leave_while_others_reduce, (how,), np=3, env=env, verbose=0, timeout=50)
    assert caught.value.rank == 1 or how != "absent"


@pytest.mark.timeout(60)
def test_shared_memory_that_was_asked_for_by_name_is_no_tcp() -> None:
    with pytest.raises(sparkvod.errors.WorkerError, match="can share no memory .* leave SPARKVOD_TRANSPORT at 'auto'"):
        sparkvod.run_local(_reduce_under_limits, (0,), np=2, env={"SPARKVOD_TRANSPORT": "shm"}, verbose=0, timeout=50)


def _allreduce_in_a_tiny_shm() -> tuple[int, list[str]]:
    basics.init()
    engine = basics.engine()
    memory = engine.allocate(32 << 20)
    handle = engine.allreduce("large", memory.address, memory.address, 8 << 20, 8, 1)
    Pending(engine, handle, None, memory).wait()
    size = os.statvfs("/dev/shm")
    return size.f_blocks * size.f_frsize, list(basics.stats()["collectives"])


TINY = """
import sparkvod
from tests.core.test_survival import _allreduce_in_a_tiny_shm
print(sparkvod.run_local(_allreduce_in_a_tiny_shm, np=2, verbose=0, timeout=40))
"""


@pytest.mark.timeout(60)
def test_the_size_of_dev_shm_does_not_matter() -> None:
    mounted = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "
    command = ["unshare", "--mount", "sh", "-c", mounted + f"'{sys.executable}' -c '{TINY}'"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        probe = subprocess.run(["unshare", "--mount", "sh", "-c", mounted + "true"], capture_output=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("no unshare was found, so /dev/shm cannot be made small")
    if probe.returncode != 0:
        pytest.skip("a mount namespace of our own is not allowed here, so /dev/shm cannot be made small")
    said = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == str([(65536, ["allreduce/shm/in-place"])] * 2)


def _init_without_descriptors(spare: int) -> str:
    used = max(int(number) for number in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + spare, used + 1 + spare))
    try:
        basics.init()
    except HorovodInternalError as error:
        return str(error)
    finally:
        basics.shutdown()
    return ""


DESCRIPTORS = """
from tests.core.test_survival import _init_without_descriptors
print(_init_without_descriptors({spare}))
"""


@pytest.mark.timeout(60)
def test_an_exhausted_table_of_descriptors_is_said() -> None:
    environment = {**os.environ, "SPARKVOD_RANK": "0", "SPARKVOD_SIZE": "1"}
    found = []
    for spare in (0, 2, 4, 6):
        code = DESCRIPTORS.format(spare=spare)
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=40
        )
        assert run.returncode == 0, run.stderr
        found.append(run.stdout.strip())
    assert "Too many open files" in found[0]
    assert "ulimit -n" in found[0]
    assert all(words == "" or "ulimit -n" in words for words in found)


# ---- coming and going -----------------------------------------------------------------------------------------------


def _segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:sparkvod" in line for line in maps)


def _holdings() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), _segments()


def _come_and_go(times: int) -> dict[str, Any]:
    process = psutil.Process()
    warm = max(times // 10, 10)
    first: tuple[int, int, int] = (0, 0, 0)
    rss = 0
    for turn in range(times):
        basics.init()
        assert _allreduce("x", basics.rank() + 1.0) == 3.0
        basics.shutdown()
        if turn == warm:
            first, rss = _holdings(), process.memory_info().rss
    # A thread that was joined may be listed for a moment longer.
    until = time.monotonic() + 5
    while _holdings() != first and time.monotonic() < until:
        time.sleep(0.01)
    return {"first": first, "last": _holdings(), "grown": process.memory_info().rss - rss}


@pytest.mark.timeout(300)
def test_worlds_come_and_go_without_a_trace(full: bool, no_leaks: None) -> None:
    times = 1000 if full else 100
    for rank in sparkvod.run_local(_come_and_go, (times,), np=2, verbose=0, timeout=280):
        assert rank["first"] == rank["last"], rank  # threads, descriptors, segments
        assert rank["last"][2] == 0
        assert rank["grown"] < 4 << 20, rank


# ---- clocks ---------------------------------------------------------------------------------------------------------


# What may look at the time of day: times that people read, that files have, or that another host has told.
TELLS_TIME = {
    "data": {"claims.py", "identity.py"},
    "estimators": {"base.py", "launching.py", "persistence.py", "trainer.py"},
    "launch": {"_local_worker.py", "failure.py", "private_folder.py"},
    "observe": {"mailbox.py", "progress.py"},
}


def test_no_deadline_hangs_on_the_time_of_day() -> None:
    """A clock that jumps moves no deadline: the engine reads the time of day for the timeline's metadata alone."""
    wall = re.compile(r"system_clock|CLOCK_REALTIME|gettimeofday|high_resolution_clock|std::time\(|\btime\(nullptr\)")
    native = [path for path in (ROOT / "native").rglob("*") if path.suffix in (".h", ".cc")]
    assert {path.name for path in native if wall.search(path.read_text())} == {"timeline.cc"}
    reads = re.compile(r"time\.time(_ns)?\(|datetime\.now\(|utcnow\(|from time import")
    found: dict[str, set[str]] = {}
    for path in (ROOT / "sparkvod").rglob("*.py"):
        if reads.search(path.read_text()):
            found.setdefault(path.relative_to(ROOT / "sparkvod").parts[0], set()).add(path.name)
    assert found == TELLS_TIME
