"""The Arrow reader: plain Parquet, by lanes, column by column without work per row.

The rank's lanes share one buffer, the arena: an array per vector column, and one for all scalar columns of a dtype. It
is divided into slots; a slot holds one window of one lane shuffled as it was decoded, while it is in the cache. A block
of steps is made by one index array, computed from the lanes' cuts, and one ``take`` per array. (Shuffling in that
``take`` instead, with one copy less, was tried: it is slower, because a window's rows come from all over it.)

Memory: two windows per lane (the one being read and the next), each of two row groups, or of more when all of them
together are small; and the blocks that are on their way to the training loop. Row groups larger than those that we
write are decoded part by part, and a window takes parts instead; unless there are so few that the shuffle would suffer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sparkvod import log
from sparkvod.data import order
from sparkvod.data.dataset import Dataset
from sparkvod.data.readers.decode import Decoder
from sparkvod.data.readers.reader import Batch, Reader
from sparkvod.data.schema import Column, row_nbytes

WINDOW_GROUPS = 1
"""Row groups of a lane that are shuffled together."""
SMALL_WINDOW = 32 << 10
"""Bytes up to which a window takes more row groups than that."""
BLOCK_BYTES = 2 << 20
"""Bytes of batches that are assembled at once."""
PART_BYTES = 4 << 20
"""Bytes of the parts of groups that are at least twice as large."""
MANY_GROUPS = 16
"""Row groups from which on large ones are cut into parts."""

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
    """A window in the arena: its rows of the lane, its slot, and the row of the arena where it begins."""

    start: int
    end: int
    slot: int
    base: int


class _Part(NamedTuple):
    """Columns that share an array: scalars of one dtype, [columns, rows], or one column of vectors, [rows, *shape]."""

    numbers: list[int]
    names: list[str]
    scalars: bool
    dtype: str
    shape: tuple[int, ...]

    def empty(self, rows: int) -> np.ndarray:
        """Returns a new array for so many rows."""
        return np.empty((len(self.numbers), rows) if self.scalars else (rows, *self.shape), self.dtype)


def _parts_of(columns: Sequence[Column]) -> list[_Part]:
    """Returns how columns share arrays."""
    scalars: dict[str, _Part] = {}
    parts: list[_Part] = []
    for number, column in enumerate(columns):
        part = None if column.shape else scalars.get(column.dtype)
        if part is None:
            part = _Part([], [], not column.shape, column.dtype, column.shape)
            parts.append(part)
            if part.scalars:
                scalars[column.dtype] = part
        part.numbers.append(number)
        part.names.append(column.name)
    return parts


class _Arena:
    """Slots of ``slot_rows`` rows in the arrays of the parts. Pages that were never written cost nothing."""

    def __init__(self, parts: Sequence[_Part], slot_rows: int, slots: int) -> None:
        self._parts, self.slot_rows = parts, slot_rows
        self._free = list(range(slots))[::-1]
        self._slots = slots
        self.arrays = [part.empty(slots * slot_rows) for part in parts]

    def write(
        self, begin: int, end: int, pieces: Sequence[Sequence[np.ndarray]], permutation: np.ndarray | None
    ) -> None:
        """Writes rows from the arrays of all columns of some pieces, shuffled, while they are in the cache."""
        columns = pieces[0] if len(pieces) == 1 else [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
        for part, array in zip(self._parts, self.arrays, strict=True):
            targets = array[:, begin:end] if part.scalars else [array[begin:end]]
            for number, target in zip(part.numbers, targets, strict=True):
                if permutation is None:
                    target[:] = columns[number]
                else:
                    columns[number].take(permutation, axis=0, out=target, mode="clip")

    def gather(self, part: int, index: np.ndarray) -> np.ndarray:
        """Returns a new array of a part's rows."""
        of = self._parts[part]
        made = of.empty(len(index))
        # mode="clip" lets numpy write into out= directly; with "raise" it goes through a copy.
        self.arrays[part].take(index, axis=int(of.scalars), out=made, mode="clip")
        return made

    def take(self) -> int:
        """Returns a free slot; when there is none the arena is doubled (a step that spans more than two windows)."""
        if not self._free:
            grown = _Arena(self._parts, self.slot_rows, 2 * self._slots)
            rows = self._slots * self.slot_rows
            for part, old, new in zip(self._parts, self.arrays, grown.arrays, strict=True):
                (new[:, :rows] if part.scalars else new[:rows])[:] = old
            self._free = list(range(self._slots, 2 * self._slots))[::-1]
            self._slots, self.arrays = grown._slots, grown.arrays
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Makes a slot free for the next window."""
        self._free.append(slot)

    def fits(self, slot_rows: int, slots: int) -> bool:
        """Tells whether the arena can serve another epoch; then it is emptied."""
        if self.slot_rows < slot_rows or self._slots < slots:
            return False
        self._free = list(range(self._slots))[::-1]
        return True


class _Lane:
    """One lane of the epoch: its windows to come, and those held."""

    def __init__(self, windows: list[_Window]) -> None:
        self.pending = windows[::-1]
        self.held: list[_Held] = []
        self.stream: _Stream | None = None
        self.reach = self._reach()

    def _reach(self) -> int:
        """Returns the row up to which the lane can be read while holding two windows."""
        ends = [held.end for held in self.held] + [window.end for window in self.pending[:-3:-1]]
        return ends[1] if len(ends) > 1 else sys.maxsize

    def release(self, begin: int, arena: _Arena) -> None:
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
        self._shared = _parts_of(self.columns)
        self._names = [column.name for column in self.columns]
        self._shuffler = order.Shuffler()
        self._row_nbytes = row_nbytes(self.columns)
        self._spare: _Arena | None = None
        groups = int(np.count_nonzero(dataset.groups[:, 2]))
        self._parts = np.ones(len(dataset.groups), dtype=np.int64)
        if groups >= MANY_GROUPS:
            wanted = np.minimum(dataset.groups[:, 3] // PART_BYTES, dataset.groups[:, 2])
            self._parts = np.maximum(wanted, self._parts)
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
        """Closes the files."""
        self._decoder.close()
        self._spare = None

    def _read(self, epoch: int, step: int) -> Iterator[Batch]:
        rows = self.dataset.groups[:, 2]
        dealt = order.deal(rows, self.seed, epoch, self.shuffle)
        lane_rows = np.array([int(rows[lane].sum()) for lane in dealt], dtype=np.int64)
        begin = order.cuts(lane_rows, np.array([step * self.global_batch]))[0]
        lanes = order.lanes_of(self.rank, self.num_proc)
        mine = {number: _Lane(self._windows(dealt[number], int(begin[number]))) for number in lanes}
        slot_rows = max([w.end - w.start for lane in mine.values() for w in lane.pending], default=1)
        # An iterator takes the last one's arena, whose pages are there already, unless that is still in use.
        arena, self._spare = self._spare, None
        if arena is None or not arena.fits(slot_rows, 2 * len(mine)):
            arena = _Arena(self._shared, slot_rows, 2 * len(mine))
        try:
            yield from self._blocks(epoch, step, lane_rows, mine, arena)
        finally:
            self._spare = arena

    def _blocks(
        self, epoch: int, step: int, lane_rows: np.ndarray, mine: dict[int, _Lane], arena: _Arena
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
            places = self._places(mine, arena, cuts, epoch)
            low, high = order.share(np.diff(cuts, axis=0), step, self.rank, self.num_proc)
            yield from self._batches(arena, places, cuts, low, high, np.diff(positions))
            step += steps

    def _windows(self, lane: np.ndarray, begin: int) -> list[_Window]:
        """Returns the windows of a lane that end after its row ``begin``."""
        parts = self._parts[lane]
        groups = np.repeat(lane, parts)
        part = np.arange(len(groups)) - np.repeat(np.cumsum(parts) - parts, parts)
        borders = self._borders(groups, part), self._borders(groups, part + 1)
        ends = np.concatenate([[0], np.cumsum(borders[1] - borders[0])])
        nbytes = self.dataset.groups[groups, 3] // self._parts[groups]
        found = order.windows(nbytes, WINDOW_GROUPS, SMALL_WINDOW)
        return [
            _Window(int(ends[first]), int(ends[end]), np.stack([groups[first:end], part[first:end]], axis=1), number)
            for number, (first, end) in enumerate(found)
            if ends[end] > begin
        ]

    def _borders(self, groups: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Returns the row of each group with which its given part begins."""
        border: np.ndarray = self.dataset.groups[groups, 2] * part // self._parts[groups]
        return border

    def _places(self, lanes: dict[int, _Lane], arena: _Arena, cuts: np.ndarray, epoch: int) -> np.ndarray:
        """Returns where in the arena the lanes' rows between the first and the last cut are, lane after lane."""
        parts = []
        for (number, lane), start, end in zip(lanes.items(), cuts[0].tolist(), cuts[-1].tolist(), strict=True):
            while (lane.held[-1].end if lane.held else start) < end:
                lane.held.append(self._load(number, lane, lane.pending.pop(), arena, epoch))
            for held in lane.held:
                if held.start < end and held.end > start:
                    offset = held.base - held.start
                    parts.append(np.arange(max(start, held.start) + offset, min(end, held.end) + offset))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _load(self, number: int, lane: _Lane, window: _Window, arena: _Arena, epoch: int) -> _Held:
        slot = arena.take()
        base, rows = slot * arena.slot_rows, window.end - window.start
        decoded = [self._decode(lane, group, part) for group, part in window.pieces.tolist()]
        permutation = None
        if self.shuffle:
            permutation = self._shuffler.permutation(rows, self.seed, epoch, 2, number, window.number)
        arena.write(base, base + rows, decoded, permutation)
        return _Held(window.start, window.end, slot, base)

    def _decode(self, lane: _Lane, group: int, part: int) -> list[np.ndarray]:
        """Returns the arrays of a piece: a group, or the next part of a large one, which is decoded as a stream."""
        if self._parts[group] == 1:
            self.decoded += 1
            return self._decoder.decode(group)
        if lane.stream is None or lane.stream.group != group:
            parts = np.arange(self._parts[group] + 1)
            sizes = np.diff(self._borders(np.full(len(parts), group), parts)).tolist()
            self.decoded += 1
            lane.stream = _Stream(group, self._decoder.stream(group, sizes))
            for _ in range(part):
                next(lane.stream.pieces)
        return next(lane.stream.pieces)

    def _batches(
        self,
        arena: _Arena,
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
                # Iterating over an array makes the rows' views with the least that Python can do.
                yield Batch(dict(zip(self._names, block[0][:, first:end], strict=True)), end - first, rows)
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
