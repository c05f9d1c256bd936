"""The Arrow reader: plain Parquet, by lanes, column by column without work per row.

The rank's lanes share one buffer, the arena: an array per vector column, and one for all scalar columns of a dtype. It
is divided into slots; a slot holds one window of one lane shuffled as it was decoded, while it is in the cache. A block
of steps is made by one index array, computed from the lanes' cuts, and one ``take`` per array. (Shuffling in that
``take`` instead, with one copy less, was tried: it is slower, because a window's rows come from all over it.)

While a block is made, threads fetch, decode and shuffle each lane's next window into its slot: one thread for local
files, for it is a core that is wanted, and :data:`REMOTE_THREADS` for others, which make the reader wait.

Memory: two windows per lane (the one being read and the next), each of one row group, or of more when all of them
together are small, and of remote files at least as many windows in all as there are threads; what the threads have
decoded and not yet shuffled; and the blocks that are on their way to the training loop. Row groups larger than those
that we write are decoded part by part, and a window takes parts instead; unless there are so few that the shuffle would
suffer.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sparkvod import log
from sparkvod.data import order
from sparkvod.data.dataset import Dataset
from sparkvod.data.readers.ahead import ReadAhead, Task
from sparkvod.data.readers.arena import Arena, parts_of
from sparkvod.data.readers.decode import Decoder
from sparkvod.data.readers.reader import Batch, Reader
from sparkvod.data.schema import row_nbytes

WINDOW_GROUPS = 1
"""Row groups of a lane that are shuffled together."""
SMALL_WINDOW = 32 << 10
"""Bytes up to which a window takes more row groups than that."""
BLOCK_BYTES = 6 << 20
"""Bytes of batches that are assembled at once."""
PART_BYTES = 4 << 20
"""Bytes of the parts of groups that are at least twice as large."""
MANY_GROUPS = 16
"""Row groups from which on large ones are cut into parts."""
REMOTE_THREADS = 8
"""Windows that are fetched at once from files that are not on this machine."""

_log = log.get("data")


class _Window(NamedTuple):
    """Rows ``start`` to ``end`` of a lane; its pieces [k, 2] are row groups and the numbers of their parts."""

    start: int
    end: int
    pieces: np.ndarray
    number: int


class _Stream(NamedTuple):
    """A large row group that is being decoded part by part."""

    group: int
    pieces: Iterator[list[np.ndarray]]


class _Held(NamedTuple):
    """A window in the arena: its rows of the lane, its slot, the row of the arena where it begins, and who loads it."""

    start: int
    end: int
    slot: int
    base: int
    task: Task


class _Lane:
    """One lane of the epoch: its windows to come, and those held."""

    def __init__(self, windows: list[_Window]) -> None:
        self.pending = windows[::-1]
        self.rows = windows[-1].end if windows else 0
        self.held: list[_Held] = []
        self.stream: _Stream | None = None
        self.reach = self._reach()

    def _reach(self) -> int:
        """Returns the row up to which the lane can be read while holding two windows."""
        ends = [held.end for held in self.held] + [window.end for window in self.pending[:-3:-1]]
        return ends[1] if len(ends) > 1 else sys.maxsize

    def release(self, begin: int, arena: Arena) -> None:
        """Gives back the windows that end before row ``begin``."""
        while self.held and self.held[0].end <= begin:
            arena.give_back(self.held.pop(0).slot)
            self.reach = self._reach()


class ArrowReader(Reader):
    """Reads plain Parquet with pyarrow; see the module's text."""

    def __init__(
        self,
        dataset: Dataset,
        columns: Sequence[str] | None = None,
        batch_size: int = 32,
        rank: int = 0,
        num_proc: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, columns, batch_size, rank, num_proc, shuffle, seed)
        self._decoder = Decoder(dataset, self.columns)
        self._shared = parts_of(self.columns)
        self._names = [column.name for column in self.columns]
        self._shuffler = order.Shuffler()
        self._row_nbytes = row_nbytes(self.columns)
        self._spare: Arena | None = None
        self._lock = threading.Lock()
        self._running: weakref.WeakSet[ReadAhead] = weakref.WeakSet()
        groups = int(np.count_nonzero(dataset.groups[:, 2]))
        self._parts = np.ones(len(dataset.groups), dtype=np.int64)
        if groups >= MANY_GROUPS:
            wanted = np.minimum(dataset.groups[:, 3] // PART_BYTES, dataset.groups[:, 2])
            self._parts = np.maximum(wanted, self._parts)
        self._any_parts = bool((self._parts > 1).any())
        if rank == 0 and groups < num_proc:
            _log.warning(
                "%s has %d row groups for %d ranks, so some ranks have nothing to read; write smaller row groups, or "
                "use fit() on "
                "a DataFrame",
                dataset.path,
                groups,
                num_proc,
            )

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """See :meth:`Reader.epoch`."""
        if not 0 <= start_step <= self.steps:
            raise ValueError(f"start_step={start_step} was found, 0 to {self.steps} was expected")
        return self._read(epoch, start_step)

    def close(self) -> None:
        """Ends the threads and closes the files."""
        for ahead in list(self._running):
            ahead.close()
        self._decoder.close()
        self._spare = None

    def _read(self, epoch: int, step: int) -> Iterator[Batch]:
        rows = self.dataset.groups[:, 2]
        dealt = order.deal(rows, self.seed, epoch, self.shuffle)
        lane_rows = np.array([int(rows[lane].sum()) for lane in dealt], dtype=np.int64)
        begin = order.cuts(lane_rows, np.array([step * self.global_batch]))[0]
        lanes = order.lanes_of(self.rank, self.num_proc)
        windows = self._windows([dealt[number] for number in lanes], begin[lanes.start : lanes.stop])
        mine = {number: _Lane(own) for number, own in zip(lanes, windows, strict=True)}
        slot_rows = max([w.end - w.start for lane in mine.values() for w in lane.pending], default=1)
        threads = REMOTE_THREADS if self._decoder.remote else 1
        depth = 1 - (threads // -max(len(mine), 1))
        # An iterator takes the last one's arena, whose pages are there already, unless that is still in use.
        arena, self._spare = self._spare, None
        if arena is None or not arena.fits(slot_rows, depth * len(mine)):
            arena = Arena(self._shared, slot_rows, depth * len(mine))
        ahead = ReadAhead(threads)
        self._running.add(ahead)
        try:
            yield from self._blocks(epoch, step, lane_rows, mine, arena, ahead, depth)
        finally:
            if ahead.close():
                self._spare = arena

    def _blocks(
        self,
        epoch: int,
        step: int,
        lane_rows: np.ndarray,
        mine: dict[int, _Lane],
        arena: Arena,
        ahead: ReadAhead,
        depth: int,
    ) -> Iterator[Batch]:
        """Yields the batches from ``step`` on, block by block."""
        lanes = order.lanes_of(self.rank, self.num_proc)
        target = max(1, BLOCK_BYTES * self.num_proc // (self._row_nbytes * self.global_batch))
        while step < self.steps:
            last = min(step + target, self.steps)
            positions = np.minimum(np.arange(step, last + 1, dtype=np.int64) * self.global_batch, self.dataset.rows)
            cuts = order.cuts(lane_rows, positions)[:, lanes.start : lanes.stop]
            for lane, start in zip(mine.values(), cuts[0].tolist(), strict=True):
                lane.release(start, arena)
            reach = np.array([lane.reach for lane in mine.values()])
            steps = max(1, int((cuts <= reach).all(axis=1)[1:].sum()))
            cuts, positions = cuts[: steps + 1], positions[: steps + 1]
            self._load(epoch, mine, cuts, arena, ahead, depth)
            places = self._places(mine, cuts)
            low, high = order.share(np.diff(cuts, axis=0), step, self.rank, self.num_proc)
            yield from self._batches(arena, places, cuts, low, high, np.diff(positions))
            step += steps

    def _windows(self, lanes: list[np.ndarray], begin: np.ndarray) -> list[list[_Window]]:
        """Returns for each lane the windows that end after row ``begin`` of it."""
        lane = np.concatenate(lanes)
        parts = self._parts[lane]
        groups = np.repeat(lane, parts)
        part = np.arange(len(groups)) - np.repeat(np.cumsum(parts) - parts, parts)
        rows = self._borders(groups, part + 1) - self._borders(groups, part)
        nbytes = self.dataset.groups[groups, 3] // self._parts[groups]
        pieces = np.stack([groups, part], axis=1)
        splits = np.cumsum([int(self._parts[own].sum()) for own in lanes])[:-1]
        found = []
        for its_begin, its_rows, its_nbytes, its_pieces in zip(
            begin.tolist(), np.split(rows, splits), np.split(nbytes, splits), np.split(pieces, splits), strict=True
        ):
            ends = [0, *np.cumsum(its_rows).tolist()]
            windows = order.windows(its_nbytes, WINDOW_GROUPS, SMALL_WINDOW)
            found.append(
                [
                    _Window(ends[first], ends[end], its_pieces[first:end], number)
                    for number, (first, end) in enumerate(windows)
                    if ends[end] > its_begin
                ]
            )
        return found

    def _borders(self, groups: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Returns the row of each group with which its given part begins."""
        border: np.ndarray = self.dataset.groups[groups, 2] * part // self._parts[groups]
        return border

    def _load(
        self, epoch: int, lanes: dict[int, _Lane], cuts: np.ndarray, arena: Arena, ahead: ReadAhead, depth: int
    ) -> None:
        """Sees to it that the lanes' rows up to the last cut are in the arena, and that what comes next will be."""
        tasks: list[Task] = []
        needed: list[Task] = []
        for (number, lane), start, end in zip(lanes.items(), cuts[0].tolist(), cuts[-1].tolist(), strict=True):
            while (lane.held[-1].end if lane.held else start) < end:
                if arena.full:
                    # A step that spans more windows than there are slots for: others' arrays are about to be replaced.
                    ahead.finish([held.task for lane in lanes.values() for held in lane.held])
                tasks.append(self._begin(epoch, number, lane, arena))
            needed += [held.task for held in lane.held if held.start < end]
        room = [(number, lane) for number, lane in lanes.items() if lane.pending and len(lane.held) < depth]
        # Not for every window that becomes free, since a thread may have to be started.
        if 2 * len(room) >= len(lanes):
            due = [
                (window.start / lane.rows, number)
                for number, lane in room
                for window in lane.pending[: len(lane.held) - depth - 1 : -1]
            ]
            tasks += [self._begin(epoch, number, lanes[number], arena) for _, number in sorted(due)]
        if tasks:
            ahead.submit(tasks)
        ahead.finish(needed)

    def _begin(self, epoch: int, number: int, lane: _Lane, arena: Arena) -> Task:
        """Returns the task that will load a lane's next window, for which a slot is taken."""
        window = lane.pending.pop()
        slot = arena.take()
        base = slot * arena.slot_rows
        # The parts of a group are decoded one after the other.
        parted = self._any_parts and lane.held and (self._parts[window.pieces[:, 0]] > 1).any()
        task = Task(
            partial(self._fill, epoch, number, lane, window, arena, base), lane.held[-1].task if parted else None
        )
        lane.held.append(_Held(window.start, window.end, slot, base, task))
        return task

    def _fill(self, epoch: int, number: int, lane: _Lane, window: _Window, arena: Arena, base: int) -> None:
        """Decodes a window and writes it, shuffled, to row ``base`` of the arena; in any thread."""
        rows = window.end - window.start
        decoded = [self._decode(lane, group, part) for group, part in window.pieces.tolist()]
        permutation = None
        if self.shuffle:
            permutation = self._shuffler.permutation(rows, self.seed, epoch, 2, number, window.number)
        arena.write(base, base + rows, decoded, permutation)

    def _places(self, lanes: dict[int, _Lane], cuts: np.ndarray) -> np.ndarray:
        """Returns where in the arena the lanes' rows between the first and the last cut are, lane after lane."""
        parts = []
        for lane, start, end in zip(lanes.values(), cuts[0].tolist(), cuts[-1].tolist(), strict=True):
            for held in lane.held:
                if held.start < end and held.end > start:
                    offset = held.base - held.start
                    parts.append(np.arange(max(start, held.start) + offset, min(end, held.end) + offset))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _decode(self, lane: _Lane, group: int, part: int) -> list[np.ndarray]:
        """Returns the arrays of a piece: a group, or the next part of a large one, which is decoded as a stream."""
        if self._parts[group] == 1:
            with self._lock:
                self.decoded += 1
            return self._decoder.decode(group)
        if lane.stream is None or lane.stream.group != group:
            parts = np.arange(self._parts[group] + 1)
            sizes = np.diff(self._borders(np.full(len(parts), group), parts)).tolist()
            with self._lock:
                self.decoded += 1
            lane.stream = _Stream(group, self._decoder.stream(group, sizes))
            for _ in range(part):
                next(lane.stream.pieces)
        return next(lane.stream.pieces)

    def _batches(
        self,
        arena: Arena,
        places: np.ndarray,
        cuts: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        global_rows: np.ndarray,
    ) -> Iterator[Batch]:
        """Yields the batches of a block: the rows low to high of each lane's part of each step."""
        counts = high - low
        lane_begin = np.concatenate([[0], np.cumsum(cuts[-1] - cuts[0])[:-1]])
        source = (lane_begin + cuts[:-1] - cuts[0] + low).ravel()
        target = np.cumsum(counts) - counts.ravel()
        ends = np.cumsum(counts.sum(axis=1)).tolist()
        total = ends[-1]
        index = places[np.repeat(source - target, counts.ravel()) + np.arange(total)]
        block = [arena.gather(part, index) for part in range(len(self._shared))]
        if len(block) == 1 and self._shared[0].scalars:
            first = 0
            for end, rows in zip(ends, global_rows.tolist(), strict=True):
                # Iterating over an array makes the rows' views with the least that Python can do; strict=True would
                # take a third more.
                yield Batch(dict(zip(self._names, block[0][:, first:end], strict=False)), end - first, rows)
                first = end
            return
        by_number: dict[int, np.ndarray] = {}
        for part, array in zip(self._shared, block, strict=True):
            by_number |= zip(part.numbers, array if part.scalars else [array], strict=True)
        arrays = {name: by_number[number] for number, name in enumerate(self._names)}
        first = 0
        for end, rows in zip(ends, global_rows.tolist(), strict=True):
            yield Batch({name: array[first:end] for name, array in arrays.items()}, end - first, rows)
            first = end
