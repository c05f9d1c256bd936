"""What runs in a Spark barrier task: one function, as one rank, in Spark's own Python worker.

Spark keeps its Python workers for later tasks, so everything that a run sets is taken back after it.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkvod import config, log
from sparkvod.errors import CollectiveTimeoutError, PeerLostError, WorkerError
from sparkvod.launch import context
from sparkvod.launch._call import call
from sparkvod.launch._file_gather import FileGather, is_private
from sparkvod.launch._pickle import dump_result
from sparkvod.launch.failure import Failure
from sparkvod.launch.output import captured
from sparkvod.observe import mailbox

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import BarrierTaskContext

SCHEMA = "rank long, seq long, chunk binary"
CHUNK_BYTES = 8 << 20
#: Functions and results above this size go through the mailbox, if there is one: Spark would hold each several times
#: over in the driver's memory, and end when that is full.
LARGE_BYTES = CHUNK_BYTES
CALL_NAME = "call"
_IN_MAILBOX = -1  # the number of a chunk that is the digest of what lies there
# What one exception may add to Spark's own error text, which is logged more than once.
_EXCEPTION_BYTES = 24 << 10
_CAUSE_SECONDS = 0.7
_MARKER = re.compile(r"\[sparkvod failure ([A-Za-z0-9+/=]+)\]")


@dataclass(frozen=True)
class Task:
    """What the driver tells every task; it travels in Spark's plan, so nothing in it is secret.

    Attributes:
        function: (fn, args, kwargs), pickled by cloudpickle; empty when they lie in the mailbox.
        env: environment variables for the function; None removes one.
        mailbox: url of the run's mailbox; empty when there is none.
        mailbox_options: fsspec's options for it.
        private: the mailbox is a directory of this host that no other user can enter.
        copy: what is printed goes to the executor's log too.
        digest: of the function in the mailbox, where one too large for Spark lies.
        limits: bytes that the results of all ranks, and of those of one executor, may have where Spark carries them.
    """

    function: bytes
    env: dict[str, str | None] = field(default_factory=dict)
    mailbox: str = ""
    mailbox_options: dict[str, Any] = field(default_factory=dict)
    private: bool = False
    copy: bool = True
    digest: str = ""
    limits: tuple[int, int] = (1 << 62, 1 << 62)


class TaskFailedError(RuntimeError):
    """What a task raises to Spark; its text carries the failure to the driver."""


def run_task(task: Task) -> Iterator[pa.RecordBatch]:
    """Runs the task's function as this barrier task's rank; yields its pickled result in chunks.

    Raises:
        TaskFailedError: the function failed.
    """
    from pyspark import BarrierTaskContext

    spark = BarrierTaskContext.get()
    order = rank_order([info.address for info in spark.getTaskInfos()])
    rank, size = order.index(spark.partitionId()), len(order)
    yield from _chunks(rank, _run(task, spark, order, rank, size))


def rank_order(addresses: list[str]) -> list[int]:
    """Returns the partition of each rank: partition order, with the partitions of one host side by side.

    Args:
        addresses: host:port of each partition's executor.
    """
    hosts = [address.rpartition(":")[0] or address for address in addresses]
    first = {host: hosts.index(host) for host in hosts}
    return sorted(range(len(hosts)), key=lambda partition: (first[hosts[partition]], partition))


def encode(failure: Failure) -> str:
    """Returns the failure as a word in an error's text; :func:`decode` finds it there."""
    return f"[sparkvod failure {base64.b64encode(zlib.compress(failure.to_json().encode(), 9)).decode()}]"


def decode(text: str) -> list[Failure]:
    """Returns the failures in Spark's error text, which is as trusted as the results that Spark carries."""
    words = dict.fromkeys(_MARKER.findall(text))
    return [Failure.from_json(zlib.decompress(base64.b64decode(word)).decode(), trusted=True) for word in words]


def _run(task: Task, spark: BarrierTaskContext, order: list[int], rank: int, size: int) -> Result:
    private = task.private and is_private(task.mailbox)
    box = mailbox.Mailbox(task.mailbox, task.mailbox_options) if task.mailbox and private == task.private else None
    poster: mailbox.Poster = box.poster(rank) if box else mailbox.NullPoster()
    with contextlib.ExitStack() as closing:  # and not finally: the traceback would end in its lines
        if box:
            closing.callback(box.close)
        return _attempt(task, spark, order, rank, size, box, poster)


def _attempt(
    task: Task,
    spark: BarrierTaskContext,
    order: list[int],
    rank: int,
    size: int,
    box: mailbox.Mailbox | None,
    poster: mailbox.Poster,
) -> Result:
    host = socket.gethostname()
    private = box is not None and task.private
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(config.set_environment, config.set_environment(task.env))
            if box:
                stack.enter_context(captured(lambda name, line: poster.post("log", stream=name, line=line), task.copy))
            poster.post("started", partition=spark.partitionId(), host=host)
            stack.enter_context(mailbox.use(poster))
            gather: Callable[[bytes], list[bytes]] = (
                FileGather(task.mailbox, rank, size, config.get("start_timeout"))
                if private
                else lambda data: _barrier_gather(spark, order, data)
            )
            with context.use(context.WorldContext(rank, size, context.only_here(gather))):
                function = box.take(CALL_NAME, task.digest) if box and task.digest else task.function
                fn, args, kwargs = pickle.loads(function)
                value = call(fn, args, kwargs)
            result = _handed_over(dump_result(value, rank), rank, box)
            if not task.mailbox:
                _agree_on_size(spark, order, len(result.data), task.limits)
        poster.post("ended")
        return result
    except BaseException as e:  # SystemExit and KeyboardInterrupt too: Spark would take them for its own end
        failure = Failure.capture(e, rank, host)
        # The mailbox tells all ranks' failures, Spark only the first that it sees.
        poster.post("failure", failure=failure.to_json())
        if failure.severity > 0 and not private:
            time.sleep(_CAUSE_SECONDS)  # the rank that is the cause shall be the first that Spark hears of
        raise _to_spark(e, failure, private) from e


def _to_spark(error: BaseException, failure: Failure, told: bool) -> TaskFailedError:
    text = f"rank {failure.rank} on {failure.host}: {failure.kind}: {failure.message}"
    if told:
        return TaskFailedError(text)
    small = Failure.capture(error, failure.rank, failure.host, _EXCEPTION_BYTES)
    return TaskFailedError(f"{text}\n{encode(small)}")


def _barrier_gather(spark: BarrierTaskContext, order: list[int], data: bytes) -> list[bytes]:
    found = _within_start_timeout(lambda: _spark_gather(spark, order, "inside", data), len(order))
    ended = [rank for rank, (where, _) in enumerate(found) if where != "inside"]
    if ended:
        raise PeerLostError(
            f"rank {ended[0]} has returned without this all-gather; call init() equally often on every rank"
        )
    return [data for _, data in found]


def _within_start_timeout(gather: Callable[[], list[tuple[str, bytes]]], size: int) -> list[tuple[str, bytes]]:
    """Returns what ``gather`` returns; Spark's all-gather waits for ever, and does not tell for whom.

    Raises:
        CollectiveTimeoutError: it did not end within the knob ``start_timeout``.
    """
    outcome: Future[list[tuple[str, bytes]]] = Future()

    def run() -> None:
        try:
            outcome.set_result(gather())
        except BaseException as e:
            outcome.set_exception(e)

    # A daemon: after a time-out the task fails, and Spark ends this process with the thread that still waits in it.
    threading.Thread(target=run, name="sparkvod-gather", daemon=True).start()
    seconds = config.get("start_timeout")
    if not wait([outcome], seconds).done:
        raise CollectiveTimeoutError(context.missing_ranks((), size, "", seconds))
    return outcome.result()


def _spark_gather(spark: BarrierTaskContext, order: list[int], where: str, data: bytes) -> list[tuple[str, bytes]]:
    by_partition = spark.allGather(f"{where} {base64.b64encode(data).decode()}")
    said = [by_partition[partition].partition(" ") for partition in order]
    return [(at, base64.b64decode(text)) for at, _, text in said]


def _agree_on_size(spark: BarrierTaskContext, order: list[int], nbytes: int, limits: tuple[int, int]) -> None:
    """Ends the run on all ranks, rather than a JVM and with it the session, when the results are too large for it."""
    found = _spark_gather(spark, order, "ended", b"%d" % nbytes)
    sizes = [int(data) if where == "ended" else 0 for where, data in found]
    tasks, executors = spark.getTaskInfos(), dict[str, int]()
    for rank, size in enumerate(sizes):
        address = tasks[order[rank]].address
        executors[address] = executors.get(address, 0) + size
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    for what, size, limit, knobs in (
        ("all ranks", sum(sizes), limits[0], "the driver, by spark.driver.memory and spark.driver.maxResultSize"),
        ("the ranks of one executor", max(executors.values()), limits[1], "it, by spark.executor.memory"),
    ):
        if size > limit:
            raise ValueError(
                f"the results of {what} are {size:,} bytes (that of rank {largest} {sizes[largest]:,}), and Spark "
                f"could bring {limit:,} through {knobs}; return less (write it to a store, return its path), give "
                "run(mailbox=...) a directory that driver and executors reach, or start the session with more"
            )


@dataclass(frozen=True)
class Result:
    """A rank's pickled result, or the digest of one that lies in the mailbox."""

    data: bytes
    in_mailbox: bool = False


def _handed_over(data: bytes, rank: int, box: mailbox.Mailbox | None) -> Result:
    if box is None or len(data) <= LARGE_BYTES:
        return Result(data)
    try:
        return Result(box.put(_result_name(rank), data).encode(), True)
    except OSError as e:
        log.get("launch.spark").warning(
            "the result of rank %d, %d bytes, cannot be written to %s (%s) and goes through Spark's driver",
            rank,
            len(data),
            box.url,
            e,
        )
        return Result(data)


def _result_name(rank: int) -> str:
    return f"result-{rank}"


def _chunks(rank: int, result: Result) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    view = memoryview(result.data)
    for seq, at in enumerate(range(0, len(view), CHUNK_BYTES)):
        chunk = pa.array([view[at : at + CHUNK_BYTES]], pa.binary())
        seq = _IN_MAILBOX if result.in_mailbox else seq
        yield pa.RecordBatch.from_arrays([pa.array([rank]), pa.array([seq]), chunk], ["rank", "seq", "chunk"])


def results(table: pa.Table, size: int, box: mailbox.Mailbox | None = None) -> list[Any]:
    """Returns the results by rank from the collected chunks, and from the mailbox.

    Raises:
        WorkerError: a rank's result is not there.
    """
    chunks: dict[int, dict[int, Any]] = {rank: {} for rank in range(size)}
    for rank, seq, chunk in zip(*(table.column(name) for name in ("rank", "seq", "chunk")), strict=True):
        chunks[rank.as_py()][seq.as_py()] = chunk.as_buffer()
    return [_result(rank, parts, box) for rank, parts in chunks.items()]


def _result(rank: int, parts: dict[int, Any], box: mailbox.Mailbox | None) -> Any:
    if not parts:
        raise WorkerError(rank, "an executor", "LookupError", "Spark brought no result of this rank", "")
    if box is None or _IN_MAILBOX not in parts:
        return pickle.loads(b"".join(parts[seq] for seq in sorted(parts)))
    try:  # the digest came through Spark, so what it fits is the rank's own
        return pickle.loads(box.take(_result_name(rank), bytes(parts[_IN_MAILBOX]).decode()))
    except OSError as e:
        said = f"its result cannot be read from {box.url}: {e}"
        raise WorkerError(rank, "an executor", "LookupError", said, "") from e
