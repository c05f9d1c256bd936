"""Fixtures of all tests: one Spark session for everybody, and a look at what a test has left behind."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import psutil
import pytest

# Workers must be this environment's Python, and Spark must not look for an address of this host's name.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

# The first compiler alone and the serial collector halve the JVM's CPU, on a machine that has none to spare.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SETTLE_SECONDS = 8.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--full`` (``make test-full``): the whole cross-products instead of a choice of them."""
    parser.addoption("--full", action="store_true", help="run the full cross-products")


_STDERR = pytest.StashKey[int]()
_BEFORE_THE_DEADLINE_SECONDS = 10.0


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the standard error of the run, which is replaced while a test runs."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Shows all stacks shortly before a test's own deadline, also where the test hangs in compiled code."""
    marker = item.get_closest_marker("timeout")
    given = (*marker.args, *marker.kwargs.values())[:1] if marker else ()
    seconds = float(given[0] if given else item.config.getini("timeout"))
    if seconds > 2 * _BEFORE_THE_DEADLINE_SECONDS:
        file = item.config.stash[_STDERR]
        faulthandler.dump_traceback_later(seconds - _BEFORE_THE_DEADLINE_SECONDS, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


FAULTS = pytest.StashKey[list[tuple[str, str, str, str]]]()


@pytest.fixture
def fault_table(request: pytest.FixtureRequest) -> list[tuple[str, str, str, str]]:
    """Rows of the table of faults: the fault, seconds to the other ranks' error, seconds to the caller's, what is said.

    It is printed at the end of the run; ``docs/failures.md`` shows it.
    """
    return request.config.stash.setdefault(FAULTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the table of faults."""
    rows = config.stash.get(FAULTS, [])
    if rows:
        terminalreporter.section("seconds from the fault to the error")
        for fault, others, caller, said in [("fault", "the other ranks", "fit", "outcome"), *rows]:
            terminalreporter.line(f"{fault:<34}{others:>18}{caller:>8}   {said[:120]}")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the full cross-products were asked for."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def leave_to_full(full: bool) -> Callable[[str], None]:
    """Skips what ``make test`` has no time for: called with why it is not missed there, or what it would take."""

    def skip(why: str) -> None:
        if not full:
            pytest.skip(f"{why}; runs with --full")

    return skip


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one Spark session: four slots, on however many cores there are."""
    pyspark_sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("no Java was found, and Spark needs one")
    folder = tmp_path_factory.mktemp("spark")
    session = (
        pyspark_sql.SparkSession.builder.master("local[4]")
        .appName("sparkvod tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.default.parallelism", "4")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", JAVA_OPTIONS)
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a process, a thread of ours, shared memory or a file descriptor of the engine."""
    checks: tuple[Callable[[], set[Any]], ...] = (_children, _threads, _shared_memory, _engine_descriptors)
    before = [check() for check in checks]
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left = [sorted(map(str, check() - old)) for check, old in zip(checks, before, strict=True)]
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not any(left), f"left behind: processes {left[0]}, threads {left[1]}, /dev/shm {left[2]}, fds {left[3]}"


def _children() -> set[tuple[int, str]]:
    """Processes below this one, without Spark's JVM and the Python workers that it keeps for later tasks."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "java" not in child.name() and "pyspark" not in line:
                found.add((child.pid, line[:200]))
        except psutil.NoSuchProcess:
            continue
    return found


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.daemon or t.name.startswith("sparkvod")}


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "sparkvod" in name} if os.path.isdir("/dev/shm") else set()


def _engine_descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "sparkvod" in target and "memfd" in target:
            found.add(f"{number}: {target}")
    return found
