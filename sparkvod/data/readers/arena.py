"""The memory of an iterator of the Arrow reader: decoded rows, shuffled, in slots of one window each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparkvod.data.schema import Column


class Part(NamedTuple):
    """Columns that share an array: scalars of one dtype, [columns, rows], or one column of vectors, [rows, *shape]."""

    numbers: list[int]
    names: list[str]
    scalars: bool
    dtype: str
    shape: tuple[int, ...]

    def empty(self, rows: int) -> np.ndarray:
        """Returns a new array for so many rows."""
        return np.empty((len(self.numbers), rows) if self.scalars else (rows, *self.shape), self.dtype)


def parts_of(columns: Sequence[Column]) -> list[Part]:
    """Returns how columns share arrays."""
    scalars: dict[str, Part] = {}
    parts: list[Part] = []
    for number, column in enumerate(columns):
        part = None if column.shape else scalars.get(column.dtype)
        if part is None:
            part = Part([], [], not column.shape, column.dtype, column.shape)
            parts.append(part)
            if part.scalars:
                scalars[column.dtype] = part
        part.numbers.append(number)
        part.names.append(column.name)
    return parts


class Arena:
    """Slots of ``slot_rows`` rows in the arrays of the parts. Pages that were never written cost nothing."""

    def __init__(self, parts: Sequence[Part], slot_rows: int, slots: int) -> None:
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
                    columns[number].take(permutation, axis=0, out=target, mode="wrap")

    def gather(self, part: int, index: np.ndarray) -> np.ndarray:
        """Returns a new array of a part's rows."""
        of = self._parts[part]
        made = of.empty(len(index))
        # mode="wrap" lets numpy write into out= directly, where "raise" goes through a copy; "clip" does too but is
        # slower by a third on scalars. No index is out of range.
        self.arrays[part].take(index, axis=int(of.scalars), out=made, mode="wrap")
        return made

    @property
    def full(self) -> bool:
        """Tells whether there is no free slot, so that :meth:`take` will make new arrays."""
        return not self._free

    def take(self) -> int:
        """Returns a free slot; when there is none the arena is doubled. Then nobody may be writing to it."""
        if not self._free:
            grown = Arena(self._parts, self.slot_rows, 2 * self._slots)
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
