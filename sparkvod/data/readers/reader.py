"""What a reader is, and the registry of readers: one line each."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sparkvod.data.dataset import Dataset
from sparkvod.errors import DataError

READERS = {
    "arrow": "sparkvod.data.readers.arrow:ArrowReader",
    "petastorm": "sparkvod.data.readers.petastorm:PetastormReader",
}


@dataclass(slots=True, eq=False)
class Batch:
    """One rank's part of one step.

    Attributes:
        columns: name -> array, contiguous: scalars [rows], vectors [rows, width].
        rows: rows of this rank, 0 when the step has nothing in its lanes.
        global_rows: rows of all ranks in this step.
    """

    columns: dict[str, np.ndarray]
    rows: int
    global_rows: int


class Reader(ABC):
    """Reads one rank's part of a data set, epoch by epoch.

    Every epoch shows each row exactly once over all ranks. The rows of a step are a function of (data, seed, epoch,
    ``batch_size * num_proc``), and every rank yields a batch for every step, without rows if need be.

    Args:
        dataset: what to read.
        columns: names of the columns to read, None for all.
        batch_size: rows per step and rank; a step takes ``batch_size * num_proc`` rows, the last one what is left.
        rank: this rank.
        num_proc: number of ranks.
        shuffle: False: the order of the data (see ``sparkvod.data.order``), the same in every epoch.
        seed: the job's seed.

    Raises:
        DataError: a column is not there or cannot become a tensor.
        ValueError: batch size, rank or number of ranks make no sense.
    """

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
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} was found, at least 1 was expected")
        if not 0 <= rank < num_proc:
            raise ValueError(f"rank={rank} of num_proc={num_proc} was found, 0 <= rank < num_proc was expected")
        names = [c.name for c in dataset.columns] if columns is None else list(dict.fromkeys(columns))
        self.dataset = dataset
        self.columns = [dataset.column(name) for name in names]
        self.global_batch = batch_size * num_proc
        self.rank, self.num_proc = rank, num_proc
        self.shuffle, self.seed = shuffle, seed
        self.decoded = 0
        """Row groups decoded so far."""

    @property
    def steps(self) -> int:
        """Steps per epoch, the same on all ranks."""
        return -(-self.dataset.rows // self.global_batch)

    @abstractmethod
    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yields this rank's batch of each step of an epoch.

        Args:
            epoch: number of the epoch; it decides the order, so epochs may be read in any order and again.
            start_step: first step to yield; what lies wholly before it is not decoded.

        Raises:
            DataError: the data hold a null, a NaN or a list of another length (only in files that we did not write).
            ValueError: ``start_step`` is not between 0 and :attr:`steps`.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the files. Iterators made before must not be used any more."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def open_reader(
    name: str,
    dataset: Dataset,
    columns: Sequence[str] | None = None,
    batch_size: int = 32,
    rank: int = 0,
    num_proc: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    global_batch: int | None = None,
) -> Reader:
    """Returns a reader by name.

    Args:
        name: a name of :data:`READERS`, or ``auto``: ``petastorm`` for data with a Unischema, ``arrow`` for the rest.
        dataset: what to read.
        columns: names of the columns to read, None for all.
        batch_size: rows per step and rank.
        rank: this rank.
        num_proc: number of ranks.
        shuffle: False: the order of the data.
        seed: the job's seed.
        global_batch: rows per step on all ranks together, at least 1, instead of ``batch_size * num_proc``.

    Raises:
        DataError: the reader cannot decode a column.
        ValueError: there is no reader of this name.
    """
    if name != "auto" and name not in READERS:
        raise ValueError(f"reader {name!r} was found, one of auto, {', '.join(READERS)} was expected")
    if name == "auto":
        name = "arrow" if dataset.codecs is None else "petastorm"
    module, kind = READERS[name].split(":")
    for column, codec in (dataset.codecs or {}).items() if name == "arrow" else ():
        if columns is None or column in columns:
            raise DataError(
                f"column {column!r} of {dataset.path} was written by Petastorm with {codec}, a plain column was "
                "expected by the reader 'arrow'; use 'petastorm' or 'auto'"
            )
    reader: type[Reader] = getattr(importlib.import_module(module), kind)
    made = reader(dataset, columns, batch_size, rank, num_proc, shuffle, seed)
    made.global_batch = global_batch or made.global_batch
    return made
