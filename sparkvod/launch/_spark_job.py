"""One run on Spark, seen from the driver: submit, watch, and make sense of what comes back."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from sparkvod import log
from sparkvod.errors import LaunchError, WorkerError
from sparkvod.launch import _spark_slots, _spark_worker
from sparkvod.launch._spark_call import Call, interruptible
from sparkvod.launch._spark_session import missing_module
from sparkvod.launch.failure import Failure, blame, silent_rank
from sparkvod.launch.launcher import EventHandler
from sparkvod.launch.output import LinePrinter
from sparkvod.observe.mailbox import Mailbox

_POLL_SECONDS = 0.05
_POLL_SECONDS_STORE = 1.0
#: How often a job that waits for its slots says so.
REPORT_SECONDS = 15.0
# A rank that only noticed a lost peer may be heard before the cause: wait this long for it.
_CAUSE_SECONDS = 1.5
_LOST = re.compile(
    r"Python worker exited unexpectedly \(crashed\)|ExecutorLostFailure[^\n]*|[Ee]xecutor \S+ (?:lost|exited)[^\n]*"
)
_FAILED_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")
_REFUSED = re.compile(r"SPARK-24(?:819|820|942)[^\n]*|[^\n]*BARRIER[^\n]*(?:SLOTS|SUPPORTED|ALLOCATION)[^\n]*", re.I)
_PYTHON_ERROR = re.compile(r"PythonException: (.*?)(?=\n\s+at )", re.S)
_GONE = re.compile(
    r"Py4JNetworkError[^\n]*|Connection(?:Refused|Reset)Error[^\n]*|SparkContext was shut down|stopped SparkContext"
    r"|StatusCode\.UNAVAILABLE"
)
_runs = itertools.count(1)
_logger = log.get("launch.spark")


class Job:
    """One run: the Spark job, and the reading of the mailbox in the calling thread while it runs.

    Args:
        spark: the session, classic or Connect.
        name: name of the user's function, for Spark's UI.
        size: number of ranks.
        timeout: seconds within which all tasks must have started.
        box: the run's mailbox, None when driver and executors share no directory.
        private: the mailbox belongs to this user on this host alone, so that pickled exceptions in it are trusted.
        printer: prints the ranks' lines.
        on_event: gets every other event.
    """

    def __init__(
        self,
        spark: Any,
        name: str,
        size: int,
        timeout: float,
        box: Mailbox | None,
        private: bool,
        printer: LinePrinter,
        on_event: EventHandler | None,
    ) -> None:
        self._size, self.timeout, self._box, self._private = size, timeout, box, private
        self._printer, self._on_event = printer, on_event
        number = next(_runs)
        readable = re.sub(r"\W+", "_", name).strip("_") or "function"
        # Spark's UI shows the tag with the job, and the name of the mapped function in its plan.
        self._spark, self._tag = spark, f"run.{number}.{readable}"
        self._name = f"sparkvod_run_{number}_{readable}"
        self._started: dict[int, str] = {}
        self._partitions: dict[int, int] = {}
        self._ended: set[int] = set()
        self._failures: dict[int, Failure] = {}
        self._late = ""
        self._unreadable = False

    def run(self, task: _spark_worker.Task, paths: list[str]) -> list[Any]:
        """Submits the task, waits, and returns the results by rank.

        Args:
            task: what every task is told.
            paths: directories that the tasks' Python shall find modules in, besides its own.

        Raises:
            WorkerError: a rank failed, or its process was lost.
            LaunchError: Spark refused the stage, or its tasks did not start in time.
        """
        if self._box is None:
            self.ask_for_slots()  # nobody could tell whether the tasks of the run itself have started
        table = self._submit(_task_function(task, paths, self._name), deadline=self._box is not None)
        return _spark_worker.results(table, self._size, self._box)

    def ask_for_slots(self) -> None:
        """Waits until all tasks can run at once, by an empty stage of the same shape.

        Raises:
            LaunchError: they could not within the time, or Spark refused the stage.
        """
        self._submit(_probe_function(), deadline=True)

    def _submit(self, function: Callable[..., Any], deadline: bool) -> Any:
        def submit() -> Any:
            ranks = self._spark.range(0, self._size, 1, self._size)
            return _collect(ranks.mapInArrow(function, _spark_worker.SCHEMA, barrier=True))

        pause = _POLL_SECONDS if self._box is None or self._private else _POLL_SECONDS_STORE
        watch = _Watch(self, deadline)
        try:
            return interruptible(self._spark, self._tag, submit, watch, pause)
        except Exception as e:
            self.read()
            explained = self._explain(f"{type(e).__name__}: {e}" if _GONE.search(type(e).__name__) else str(e))
            # Pages of the JVM's frames that say "cancelled" explain nothing beside our own words.
            cause = None if self._late else e
            raise explained from (explained.__cause__ if isinstance(explained, WorkerError) else cause)
        finally:
            self.read()

    # --- while the job runs -------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether tasks are not known to have started."""
        return len(self._started) < self._size

    def standing(self, tag: str) -> str:
        """Returns how many ranks can run, with what Spark itself reports."""
        if self._started:
            return f"{len(self._started)} of {self._size} ranks have started"
        found = _spark_slots.reported(self._spark, tag)
        if found is None:
            return f"none of {self._size} ranks has started; this session does not report how many slots are free"
        free = min(max(found.slots - found.running + found.own, 0), self._size)
        return f"{free} of {self._size} ranks have a slot; Spark reports {found}"

    def give_up(self, tag: str) -> None:
        """Remembers that the tasks did not start in time."""
        count = "not all" if self._box is None else f"{len(self._started)}"
        self._late = (
            f"{count} of {self._size} tasks had started after {self.timeout:g} s (start_timeout; {self.standing(tag)})"
        )

    def read(self) -> None:
        """Takes what the ranks have posted."""
        try:
            events = self._box.read_new() if self._box is not None else []
        except OSError as e:  # a store that is not there for a moment must not end the run
            if not self._unreadable:
                _logger.warning("the mailbox %s cannot be read, trying again: %s", self._box and self._box.url, e)
            self._unreadable = True
            return
        for event in events:
            kind, rank = event["kind"], event["rank"]
            if kind == "log":
                self._print(rank, str(event.get("stream")), str(event.get("line")))
            elif kind == "started":
                self._started[rank] = str(event.get("host"))
                self._partitions[int(event["partition"])] = rank
            elif kind == "ended":
                self._ended.add(rank)
            elif kind == "failure":
                self._failures[rank] = Failure.from_json(event["failure"], trusted=self._private)
            else:
                self._tell(event)

    def _print(self, rank: int, stream: str, line: str) -> None:
        try:
            self._printer(rank, stream, line)
        except (OSError, ValueError) as e:  # a closed or broken stream of the caller's must not end the ranks
            _logger.debug("a line of rank %d could not be printed: %s", rank, e)

    def _tell(self, event: dict[str, Any]) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            _logger.exception("on_event failed; it is not called again")
            self._on_event = None

    # --- what a failed job means --------------------------------------------------------------------------------

    def _explain(self, text: str) -> WorkerError | LaunchError:
        """Returns what to raise for Spark's error text."""
        if self._late:
            return LaunchError(
                f"{self._late}, and all must run at once; the job was interrupted. Other jobs may hold the slots, or "
                "the cluster has too few: give a smaller num_proc, ask for more executors or cores, or raise "
                "start_timeout"
            )
        for failure in _spark_worker.decode(text):
            self._failures[failure.rank] = failure  # with its exception, which a shared mailbox does not bring
        lost = _LOST.search(text)
        ended = self._lost(text, lost) if lost else []
        # Of a lost executor Spark says no rank, which those that noticed will know.
        if (self._failures and not lost) or any(f.rank < 0 for f in ended):
            self._await_cause()
            ended = self._lost(text, lost) if lost else []
        failures = [*self._failures.values(), *ended]
        if failures:
            return blame(failures).error()
        if refused := _REFUSED.search(text):
            return LaunchError(
                f"Spark refused the barrier stage: {refused.group().strip()}; all {self._size} ranks must run at once: "
                "give a smaller num_proc, or more executors or cores, without dynamic allocation"
            )
        if gone := _GONE.search(text):
            return LaunchError(
                f"the Spark session ended while the job ran ({gone.group().strip()}); make a new one. If its JVM died "
                "of too little memory, which its log says, start it with a larger spark.driver.memory, or return less"
            )
        if "spark.driver.maxResultSize" in text:
            return LaunchError(
                "the ranks' results together are larger than spark.driver.maxResultSize allows; return less (write it "
                "to a store), or start the session with a larger spark.driver.maxResultSize"
            )
        if "OutOfMemoryError" in text:
            return LaunchError(
                "a JVM of Spark ran out of memory with what the ranks return; return less (write it to a store), give "
                "run(mailbox=...) a directory that driver and executors reach, or start the session with a larger "
                f"spark.driver.memory and spark.executor.memory ({_essence(text)})"
            )
        if advice := missing_module(text):
            return LaunchError(f"the Spark job failed outside the function: {advice}")
        return LaunchError(f"the Spark job failed outside the function: {_essence(text)}")

    def _await_cause(self) -> None:
        """Gives the rank that is the cause of what others noticed a moment to be heard."""
        until = time.monotonic() + _CAUSE_SECONDS
        while self._box is not None and time.monotonic() < until:
            # A rank whose process ended, or that stood still for the whole time-out, will say nothing any more.
            silent = set(self._started) - self._ended - set(self._failures)
            silent -= {silent_rank(f) for f in self._failures.values()}
            if not silent or any(f.severity == 0 for f in self._failures.values()):
                return
            time.sleep(_POLL_SECONDS)
            self.read()

    def _lost(self, text: str, lost: re.Match[str]) -> list[Failure]:
        """Says which rank's process went away without a word, given that Spark's error says that one did."""
        if any(f.severity == 0 for f in self._failures.values()):
            return []
        silent = sorted(set(self._started) - self._ended - set(self._failures))
        task = _FAILED_TASK.search(text)
        rank = self._partitions.get(int(task.group(1)), -1) if task else -1
        if rank not in silent:
            rank = silent[0] if len(silent) == 1 else -1
        how = f"ended without a word (Spark: {lost.group().strip()})"
        if rank == -1 and self._failures:
            return []  # somebody noticed, and knows better which one it was
        return [Failure.lost(rank, self._started.get(rank, "an executor"), how)]


class _Watch:
    """What is done in the calling thread while a job runs: its mailbox is read, and its start is waited for.

    Args:
        job: the job.
        deadline: whether the job's tasks have to start within its time.
    """

    def __init__(self, job: Job, deadline: bool) -> None:
        self._job, self._deadline = job, deadline
        self._began = time.monotonic()
        self._report = self._began + REPORT_SECONDS
        self._cancel: float | None = None

    def __call__(self, call: Call[Any]) -> None:
        """Looks once."""
        self._job.read()
        now = time.monotonic()
        if not self._deadline or not (self._job.waiting or self._cancel):
            return
        if self._cancel is None and now > self._began + self._job.timeout:
            self._job.give_up(call.tag)
            self._cancel = now
        if self._cancel is not None and now >= self._cancel:
            call.cancel()  # again and again: it may come before the job is known to Spark
            self._cancel = now + 1
        elif self._cancel is None and now > self._report:
            self._report = now + REPORT_SECONDS
            left = self._began + self._job.timeout - now
            _logger.warning("%s: waiting for %.0f s more", self._job.standing(call.tag), left)


def _essence(text: str) -> str:
    """Returns what Spark's error says, without the frames of the JVM."""
    if python := _PYTHON_ERROR.search(text):
        return python.group(1)
    said = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    text = "\n".join(said)
    return text[max(text.find("Job aborted"), 0) :][:2000]


def _task_function(task: _spark_worker.Task, paths: list[str], name: str) -> Callable[..., Any]:
    """Returns what Spark maps.

    It is pickled by value and holds plain data only, so that it can be read, and widen ``sys.path``, before sparkvod
    can be imported.
    """
    told = {field.name: getattr(task, field.name) for field in fields(task)}

    def sparkvod_task(batches: Any) -> Any:
        import sys

        for _ in batches:  # the range that only gives each task its partition
            pass
        before = list(sys.path)
        sys.path += [path for path in paths if path not in before]
        try:
            try:
                from sparkvod.launch import _spark_worker as worker
            except ImportError as e:
                raise ImportError(
                    f"sparkvod cannot be imported by this executor's Python, {sys.executable} ({e}); install it there, "
                    "or ship it with spark.addArtifacts or --py-files"
                ) from e
            yield from worker.run_task(worker.Task(**told))
        finally:
            sys.path[:] = before

    sparkvod_task.__name__ = sparkvod_task.__qualname__ = name
    return sparkvod_task


def _probe_function() -> Callable[..., Any]:
    """Returns a task that does nothing: when it ends, the slots are there."""

    def sparkvod_probe(batches: Any) -> Any:
        yield from ()

    return sparkvod_probe


def _collect(frame: Any) -> Any:
    if hasattr(frame, "toArrow"):
        return frame.toArrow()
    import pyarrow as pa  # Spark 3.5

    rows = [{**row.asDict(), "chunk": bytes(row["chunk"])} for row in frame.collect()]
    return pa.Table.from_pylist(rows, pa.schema([("rank", pa.int64()), ("seq", pa.int64()), ("chunk", pa.binary())]))
