"""Calls that start Spark jobs, made so that an interrupt ends the jobs, and Spark does not end their quiet workers.

pyspark waits for a running job's end even while an exception leaves the waiting function. In a script its own signal
handler has cancelled the job by then. A notebook's kernel replaces that handler, so an interrupt there would wait for
the whole job. Here the call runs in a thread of its own, and the caller waits where an interrupt reaches it at once.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from sparkvod import log

_IDLE_TIMEOUT = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"
_PAUSE_SECONDS = 0.5
# How long an interrupted call may take to end, and how often its jobs are cancelled meanwhile: a cancellation may come
# before Spark knows the job, and a call may start another one.
_END_SECONDS = 5.0
_CANCEL_SECONDS = 0.2
_logger = log.get("launch.spark")
_T = TypeVar("_T")


class Call(Generic[_T]):
    """One call in a thread of its own, all of whose Spark jobs carry a tag.

    Args:
        spark: the session that the jobs run in, classic or Connect.
        name: what Spark's UI shows with the jobs: the beginning of their tag.
        call: starts the jobs.
    """

    def __init__(self, spark: Any, name: str, call: Callable[[], _T]) -> None:
        self._spark, self._call = spark, call
        self._connect = "connect" in type(spark).__module__
        #: What all its jobs are tagged with.
        self.tag = f"sparkvod.{name}.{secrets.token_hex(4)}"
        self._outcome: Future[_T] = Future()

    def start(self) -> None:
        """Starts the thread, which has the caller's job group, tags and other local properties."""
        from pyspark import InheritableThread

        InheritableThread(target=self._run, session=self._spark, name="sparkvod-spark-call", daemon=True).start()

    def ended(self, seconds: float) -> bool:
        """Waits for the call's end for up to ``seconds``; returns whether it has ended."""
        return bool(wait([self._outcome], seconds).done)

    def result(self) -> _T:
        """Returns what the call returned, or raises what it raised."""
        return self._outcome.result()

    def cancel(self) -> None:
        """Cancels the jobs that the call runs at this moment, and no others."""
        try:
            if self._connect:
                self._spark.interruptTag(self.tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self.tag)
        except Exception as e:  # the session may be ending itself
            _logger.warning("the Spark jobs with the tag %s could not be cancelled: %s", self.tag, e)

    def end(self) -> None:
        """Cancels the call's jobs until it has ended, for a few seconds at most."""
        until = time.monotonic() + _END_SECONDS
        while time.monotonic() < until:
            self.cancel()
            if self.ended(_CANCEL_SECONDS):
                return
        _logger.warning("the call with the tag %s did not end within %g s of its cancellation", self.tag, _END_SECONDS)

    def _run(self) -> None:
        tags = self._spark if self._connect else self._spark.sparkContext
        add, remove = ("addTag", "removeTag") if self._connect else ("addJobTag", "removeJobTag")
        try:
            getattr(tags, add)(self.tag)
            self._outcome.set_result(self._call())
        except BaseException as e:  # for the caller
            self._outcome.set_exception(e)
        finally:
            try:
                getattr(tags, remove)(self.tag)
            except Exception as e:  # the session has ended, which the call's own error tells
                _logger.debug("the tag %s could not be removed: %s", self.tag, e)


def interruptible(
    spark: Any,
    name: str,
    call: Callable[[], _T],
    meanwhile: Callable[[Call[_T]], None] | None = None,
    pause: float = _PAUSE_SECONDS,
) -> _T:
    """Returns ``call()``, which starts Spark jobs; an interrupt of the caller cancels them and is raised at once.

    Args:
        spark: the session that the jobs run in, classic or Connect.
        name: what Spark's UI shows with the jobs: the beginning of their tag.
        call: the call; it runs in a thread of its own.
        meanwhile: called here every ``pause`` seconds while the call runs; an exception of it ends the call too.
        pause: seconds between two calls of ``meanwhile``.
    """
    running = Call(spark, name, call)
    with without_idle_timeout(spark):
        try:
            running.start()
            while not running.ended(pause):
                if meanwhile is not None:
                    meanwhile(running)
        except BaseException:
            running.end()
            raise
    return running.result()


_lock = threading.Lock()
# By session: how many calls need its idle timeout to be off, and the value that it had before the first of them.
_quiet: dict[str, tuple[int, str | None]] = {}


@contextmanager
def without_idle_timeout(spark: Any) -> Iterator[None]:
    """Turns off, in the session, Spark's ending of Python workers that send no data for a while.

    A rank sends nothing before its result. The last of the calls that overlap restores the session's value.
    """
    session = str(spark.session_id if "connect" in type(spark).__module__ else spark._jsparkSession.sessionUUID())
    with _lock:
        users, before = _quiet.get(session, (0, None))
        if users == 0:
            before = _turn_off(spark)
        _quiet[session] = (users + 1, before)
    try:
        yield
    finally:
        with _lock:
            users, before = _quiet.pop(session)
            if users > 1:
                _quiet[session] = (users - 1, before)
            elif before is not None:
                _restore(spark, before)


def _turn_off(spark: Any) -> str | None:
    """Returns the value to restore; None when the timeout is off, or unknown to this Spark."""
    try:
        before = spark.conf.get(_IDLE_TIMEOUT, None)
        if before is None or float(before.rstrip("s")) <= 0:
            return None
        spark.conf.set(_IDLE_TIMEOUT, "0")
        return str(before)
    except Exception as e:
        _logger.warning("%s could not be set to 0 for the time of a Spark job: %s", _IDLE_TIMEOUT, e)
        return None


def _restore(spark: Any, before: str) -> None:
    try:
        spark.conf.set(_IDLE_TIMEOUT, before)
    except Exception as e:  # the session has ended
        _logger.debug("%s could not be set to %s again: %s", _IDLE_TIMEOUT, before, e)
