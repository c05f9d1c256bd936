"""Reading ahead: the tasks and their threads, and the Arrow reader on files that take their time."""

from __future__ import annotations

import gc
import io
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from sparkvod.data import Dataset, open_reader
from sparkvod.data.readers import arrow
from sparkvod.data.readers.ahead import ReadAhead, Task
from sparkvod.errors import DataError
from tests.contracts.reader import write

pytestmark = pytest.mark.timeout(60)
LATENCY = 0.03


def threads() -> list[str]:
    """Returns the names of the threads that read ahead."""
    return [thread.name for thread in threading.enumerate() if thread.name == "sparkvod-read-ahead"]


class SlowFile(io.RawIOBase):
    """A local file whose reads take their time."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        with Slow.lock:
            Slow.now += 1
            Slow.seen.append(Slow.now)
        try:
            time.sleep(LATENCY)
            return self._file.readinto(buffer)
        finally:
            with Slow.lock:
                Slow.now -= 1

    def close(self) -> None:
        self._file.close()
        super().close()


class Slow(fsspec.AbstractFileSystem):
    """A file system like an object store: every read takes LATENCY; counts how many of them are under way."""

    protocol = "slow"
    lock = threading.Lock()
    now = 0
    seen: list[int] = []

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> SlowFile:
        return SlowFile(path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each step a block and each row group a window, as they are in large data."""
    monkeypatch.setattr(arrow, "BLOCK_BYTES", 1)
    monkeypatch.setattr(arrow, "SMALL_WINDOW", 0)


@pytest.fixture
def slow(tmp_path: Path, small: None) -> Iterator[Dataset]:
    """A data set of 96 row groups in 8 files, on the slow file system."""
    fsspec.register_implementation("slow", Slow, clobber=True)
    dataset = write(tmp_path, [[50] * 12] * 8)
    Slow.seen.clear()
    yield replace(dataset, path=f"slow://{dataset.path}")
    assert threads() == []


def test_tasks_run_in_order_and_each_once() -> None:
    for count in (0, 1, 4):
        ahead = ReadAhead(count)
        done: list[int] = []
        tasks = [Task(partial(done.append, number)) for number in range(200)]
        ahead.submit(tasks[:100])
        ahead.finish(tasks[:150])
        ahead.submit(tasks[140:])
        ahead.finish(tasks)
        assert sorted(done) == list(range(200))
        assert ahead.close()
    assert threads() == []


def test_a_task_waits_for_the_one_before_it() -> None:
    ahead = ReadAhead(4)
    done: list[int] = []
    tasks: list[Task] = []
    for number in range(20):

        def call(number: int = number) -> None:
            time.sleep(0.002 * (number % 3))
            done.append(number)

        tasks.append(Task(call, tasks[-1] if tasks else None))
    ahead.submit(tasks)
    ahead.finish(tasks)
    assert done == list(range(20))
    ahead.close()


def test_threads_end_without_a_close() -> None:
    ahead = ReadAhead(3)
    ahead.submit(Task(lambda: None) for _ in range(10))
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == []


def test_errors_come_where_they_belong() -> None:
    ahead = ReadAhead(1)

    def fail() -> None:
        raise KeyError("broken")

    good, bad = Task(lambda: None), Task(fail)
    ahead.submit([bad, good])
    ahead.finish([good])
    with pytest.raises(KeyError, match="broken"):
        ahead.finish([bad])
    ahead.close()


def test_the_latency_of_a_remote_store_is_hidden(slow: Dataset) -> None:
    with open_reader("arrow", slow, ["id"], 20, seed=2) as reader:
        expected = [batch.columns["id"].tolist() for batch in reader.epoch(1)]
    # The threads and the consumer: most reads, once it has begun, are one of many under way.
    assert max(Slow.seen) > arrow.REMOTE_THREADS // 2
    assert max(Slow.seen) <= arrow.REMOTE_THREADS + 1
    assert np.mean(Slow.seen) >= 3
    local = replace(slow, path=slow.path.removeprefix("slow://"))
    with open_reader("arrow", local, ["id"], 20, seed=2) as reader:
        assert [batch.columns["id"].tolist() for batch in reader.epoch(1)] == expected


def test_a_rank_with_few_lanes_reads_as_many_at_once(slow: Dataset) -> None:
    with open_reader("arrow", slow, ["id"], 5, 3, 8) as reader:
        list(reader.epoch(0))
        assert reader.decoded == len(slow.groups) / 8
    assert max(Slow.seen) > arrow.REMOTE_THREADS // 2


@pytest.mark.parametrize("how", ["close the iterator", "close the reader", "forget both", "error"])
def test_an_epoch_that_is_left_leaves_no_thread(slow: Dataset, how: str) -> None:
    reader = open_reader("arrow", slow, ["id"], 20)
    batches = reader.epoch(0)
    next(batches)
    if how == "close the iterator":
        batches.close()  # type: ignore[attr-defined]
    elif how == "close the reader":
        reader.close()
    elif how == "error":

        def broken(group: int) -> list[np.ndarray]:
            raise DataError("broken")

        reader._decoder.decode = broken  # type: ignore[attr-defined]
        with pytest.raises(DataError, match="broken"):
            list(batches)
    else:
        del batches, reader
        gc.collect()
    assert threads() == []


def test_an_error_comes_after_the_batches_before_it(tmp_path: Path, small: None) -> None:
    dataset = write(tmp_path, [[50] * 64, [50] * 64])
    with open_reader("arrow", dataset, ["id"], 32, shuffle=False) as reader:
        whole = [batch.columns["id"].tolist() for batch in reader.epoch(0)]
        decoded = reader._decoder.decode  # type: ignore[attr-defined]

        def broken(group: int) -> list[np.ndarray]:
            if group == 34:  # the second of its lane
                raise DataError("row group 34 is broken")
            return decoded(group)

        reader._decoder.decode = broken  # type: ignore[attr-defined]
        seen: list[list[int]] = []
        with pytest.raises(DataError, match="row group 34 is broken"):
            seen.extend(batch.columns["id"].tolist() for batch in reader.epoch(0))
    first = next(step for step, ids in enumerate(whole) if any(34 * 50 <= i < 35 * 50 for i in ids))
    assert seen == whole[:first]


@pytest.mark.parametrize("start", [0, 90, 159])
def test_nothing_is_decoded_that_is_not_read(tmp_path: Path, small: None, start: int) -> None:
    dataset = write(tmp_path, [[500] * 32, [500] * 32])
    with open_reader("arrow", dataset, ["id"], 200) as reader:
        ids = [i for batch in reader.epoch(0, start) for i in batch.columns["id"].tolist()]
        assert reader.decoded == len({i // 500 for i in ids})


def test_a_process_forked_between_epochs_reads(tmp_path: Path, small: None) -> None:
    dataset = write(tmp_path, [[500] * 64])
    with open_reader("arrow", dataset, ["id"], 200) as reader:
        expected = [batch.columns["id"].tolist() for batch in reader.epoch(0)]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if [batch.columns["id"].tolist() for batch in reader.epoch(0)] == expected else 2
            finally:
                os._exit(status)
        assert [batch.columns["id"].tolist() for batch in reader.epoch(0)] == expected
        assert ended(child) == 0


def test_a_child_is_told_that_the_threads_are_not_there() -> None:
    ahead = ReadAhead(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(RuntimeError, match="begin the epoch anew"):
                ahead.finish([])
            status = 0 if not ahead.close() else 2
        finally:
            os._exit(status)
    assert ended(child) == 0


def ended(child: int) -> int:
    """Returns the exit code of a child, which has 30 s."""
    deadline = time.monotonic() + 30
    found, status = os.waitpid(child, os.WNOHANG)
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found, status = os.waitpid(child, os.WNOHANG)
    if not found:
        os.kill(child, 9)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
