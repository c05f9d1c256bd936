"""How the ranks of one machine are timed: they meet in memory that they share, whoever's collectives are measured."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

MOST_RANKS, MOST_CALLS = 16, 2000
SPIN_SECONDS, SLEEP_SECONDS = 2e-3, 1e-3
_LINE = 8  # eight-byte words of a cache line


class Meeting:
    """A page where ranks wait for each other without the engine under test, and compare their times.

    Args:
        path: file that all ranks share; :meth:`make` has made it.
        rank: rank of this process.
        size: number of ranks.
        cores: that they share; None: those that this process may use.
        progress: called again and again while this rank waits, for collectives that go on only inside of calls: a
            rank may have ended one while another still waits for what it has not sent yet.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        size: int,
        cores: int | None = None,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self._progress = progress
        self._crowded = size > (len(os.sched_getaffinity(0)) if cores is None else cores)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        words = memoryview(self._map)
        self._arrivals = words[: 8 * _LINE * MOST_RANKS].cast("Q")
        self._times = words[8 * _LINE * MOST_RANKS :].cast("d")
        self._round = 0

    @staticmethod
    def make(path: Path) -> Path:
        """Makes the file."""
        path.write_bytes(bytes(8 * MOST_RANKS * (_LINE + 2 * MOST_CALLS)))
        return path

    def wait(self) -> None:
        """Waits until all ranks are here: for a while awake, because sleepers do not wake at the same time."""
        self._round += 1
        self._arrivals[self.rank * _LINE] = self._round
        began = time.perf_counter()
        for rank in range(self.size):
            while self._arrivals[rank * _LINE] < self._round:
                self._progress()
                if time.perf_counter() - began > SPIN_SECONDS:
                    time.sleep(SLEEP_SECONDS)
                else:
                    os.sched_yield()

    def compare(self, starts: list[float], ends: list[float], back_to_back: bool) -> float:
        """Returns the median over calls, on every rank, in seconds.

        Args:
            starts: when this rank began each call.
            ends: when it had ended it.
            back_to_back: a call took what it took the slowest rank. Else it took from the last start to the last end;
                from the first start where ranks outnumber cores: they leave the meeting one after the other, and a
                collective that does not wait for all would be done for the most part when the last one starts.
        """
        calls = len(starts)
        own = 2 * MOST_CALLS * self.rank
        for call in range(calls):
            self._times[own + 2 * call], self._times[own + 2 * call + 1] = starts[call], ends[call]
        self.wait()
        values = []
        start = min if self._crowded else max
        for call in range(calls):
            at = [2 * MOST_CALLS * rank + 2 * call for rank in range(self.size)]
            if back_to_back:
                values.append(max(self._times[i + 1] - self._times[i] for i in at))
            else:
                values.append(max(self._times[i + 1] for i in at) - start(self._times[i] for i in at))
        self.wait()  # nobody overwrites what others still read
        return statistics.median(values)

    def timed(self, call: Callable[[], object], calls: int, prepare: Callable[[], object] | None = None) -> float:
        """Measures one round, after a call that is not counted.

        Args:
            call: what is measured.
            calls: how often, at most :data:`MOST_CALLS`.
            prepare: done before each call, which then begins when all ranks are ready; without it calls follow each
                other at once, which shows a latency that the meeting would hide.

        Returns:
            The median in seconds, on every rank.
        """
        starts, ends = [0.0] * calls, [0.0] * calls
        clock = time.perf_counter
        self.wait()
        for number in range(-1, calls):
            if prepare is not None:
                prepare()
                self.wait()
            start = clock()
            call()
            end = clock()
            if number >= 0:
                starts[number], ends[number] = start, end
        return self.compare(starts, ends, prepare is None)
