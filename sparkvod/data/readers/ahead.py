"""Runs calls ahead of their consumer, in a few threads that live no longer than there is something to run."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

# How long a close waits for threads that may be in a read of a store that does not answer.
_CLOSE_SECONDS = 60.0


class Task:
    """One call. Its owner asks for its end with :meth:`ReadAhead.finish`.

    Args:
        call: what to call.
        after: a task that must have ended before, if any; it must have been submitted before.
    """

    def __init__(self, call: Callable[[], None], after: Task | None = None) -> None:
        self._call, self._after = call, after
        # Held until the call has ended. An Event is made of more, and one is made for every window.
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None
        self.claimed = False

    def run(self) -> None:
        """Calls; what it raises is kept for :meth:`wait`."""
        try:
            if self._after is not None:
                self._after._join()
            self._call()
        except BaseException as error:  # handed to whoever waits, whatever it is
            self._error = error
        finally:
            self._after = None
            self._running.release()

    def wait(self) -> None:
        """Waits for the end of the call and raises what it raised."""
        self._join()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None

    def _join(self) -> None:
        with self._running:
            return


class ReadAhead:
    """Runs tasks in the order in which they are submitted.

    A thread ends when it finds nothing to run, so an owner that is forgotten leaves none behind, and the end of the
    process waits for no more than what was submitted. An owner that needs the result of a task which no thread has
    begun runs it itself, so that it does not wait for a busy core.

    Args:
        threads: how many to use at most.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._lock = threading.Lock()
        self._pending: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self._closed = False
        self._process = os.getpid()

    def submit(self, tasks: Iterable[Task]) -> None:
        """Lets the threads begin with these tasks when they have done those before."""
        self._check()
        with self._lock:
            self._pending.extend(task for task in tasks if not task.claimed)
            while not self._closed and self._alive < min(self._most, len(self._pending)):
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._work, name="sparkvod-read-ahead", daemon=False)
                thread.start()
                self._threads.append(thread)
                self._alive += 1

    def finish(self, tasks: Iterable[Task]) -> None:
        """Waits for the end of tasks, and runs those that nobody has begun.

        Raises:
            BaseException: what the first of them that failed has raised.
        """
        self._check()
        tasks = list(tasks)
        for task in tasks:
            if self._claim(task):
                task.run()
        for task in tasks:
            task.wait()

    def close(self) -> bool:
        """Drops what was not begun and waits for the threads; more calls do nothing.

        Returns:
            False if a thread may still be at work: the garbage collector called this from one of them, the process is
            a child of the one that made this, or a read did not end within a minute.
        """
        if self._process != os.getpid():
            return False  # there are no threads here, but one of them may have left the lock taken
        with self._lock:
            self._closed = True
            self._pending.clear()
            threads = self._threads
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)

    def _check(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"an epoch that process {self._process} began was continued in process {os.getpid()}, its child; its "
                "threads do not exist there: begin the epoch anew with epoch(number, start_step)"
            )

    def _claim(self, task: Task) -> bool:
        with self._lock:
            if task.claimed:
                return False
            task.claimed = True
            # Tasks are claimed in their order, so this is the first of those that are left.
            if task in self._pending:
                self._pending.remove(task)
            return True

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._alive -= 1
                    return
                task = self._pending.popleft()
                task.claimed = True
            task.run()
            del task
