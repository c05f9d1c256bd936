"""The Petastorm reader: its workers, codecs and conversions, in our order.

Lanes, windows and batches are the Arrow reader's. Instead of a data set and a number of epochs, Petastorm's worker is
given one piece at a time, a row group or a part of one, by its pool without threads (``DummyPool``). So neither its
sharding nor its order, nor the way in which it ends an epoch, has any say in which rows are read.

Data that were written with a Unischema are decoded by ``PyDictReaderWorker``, row by row and codec by codec, as
``make_reader`` does; plain Parquet goes through ``ArrowReaderWorker`` and the conversion of ``make_batch_reader``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkvod.data import petastorm_compat, unischema
from sparkvod.data.dataset import Dataset
from sparkvod.data.petastorm_pieces import as_lists, path_values
from sparkvod.data.readers.arrow import ArrowReader
from sparkvod.data.readers.decode import Decoder
from sparkvod.data.schema import Column
from sparkvod.errors import DataError


class PetastormReader(ArrowReader):
    """Reads with Petastorm; see the module's text.

    Raises:
        DataError: Petastorm is not installed.
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
        super().__init__(dataset, columns, batch_size, rank, num_proc, shuffle, seed)
        self._decoder = PetastormDecoder(dataset, self.columns)


class _Piece:
    """What Petastorm's workers take for a piece: rows that have been read already."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def read(self, columns: Any = None, partitions: Any = None) -> pa.Table:
        return self._table


class PetastormDecoder(Decoder):
    """Decodes the rows of row groups with Petastorm.

    Args:
        dataset: the data set.
        columns: the columns to decode.

    Raises:
        DataError: Petastorm is not installed.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[Column]) -> None:
        super().__init__(dataset, columns)
        petastorm_compat.require()
        from petastorm.arrow_reader_worker import ArrowReaderWorker
        from petastorm.cache import NullCache
        from petastorm.py_dict_reader_worker import PyDictReaderWorker
        from petastorm.unischema import Unischema, UnischemaField
        from petastorm.workers_pool.dummy_pool import DummyPool

        self._by_row = dataset.codecs is not None
        if self._by_row:
            pickled = unischema.stored(self._fs, self._root)
            if pickled is None:
                raise DataError(
                    f"no Unischema was found in {dataset.path}, its _common_metadata was expected there: it has been "
                    "deleted since the data set was opened"
                )
            stored = unischema.load(pickled, dataset.path)
            fields = [stored.fields[column.name] for column in columns]
        else:
            fields = [
                UnischemaField(c.name, np.dtype(c.dtype).type, (None,) if c.shape else (), None, False) for c in columns
            ]
        self._schema = Unischema("sparkvod", fields)
        self._pieces: list[_Piece] = []
        self._lock = threading.Lock()
        self._pool = DummyPool()
        kind = _without_listing(PyDictReaderWorker if self._by_row else ArrowReaderWorker)
        arguments = (self._fs, self._root, self._schema, None, self._pieces, NullCache(), None, self._schema)
        self._pool.start(kind, (*arguments, None, False, None))
        self._results = kind.new_results_queue_reader()
        # The partition columns are in the paths of the files and not in the files.
        in_path = dict(path_values(dataset.files[0])) if self._by_row else {}
        self._in_path = [name for name in self._names if name in in_path]
        self._names = [name for name in self._names if name not in self._in_path]

    def _arrays(self, table: pa.Table, number: int) -> list[np.ndarray]:
        """Sends rows of a file through Petastorm and returns the arrays of the columns."""
        values = dict(path_values(self._dataset.files[number]))
        for name in self._in_path:
            value: Any = values[name]
            if self._dataset.column(name).dtype == "bool":
                value = value.lower() == "true"
            table = table.append_column(name, pa.array([value] * table.num_rows))
        for column in self._columns:
            self._inspect(column, table.column(column.name), number)
        try:
            with self._lock:
                found = self._through_petastorm(as_lists(table))
        except DataError:
            raise
        except Exception as error:  # codecs raise anything
            raise DataError(
                f"Petastorm cannot decode rows of {self._name(number)} ({type(error).__name__}: {error}), values as "
                "its Unischema says were expected; write the file again"
            ) from error
        return [self._array(column, found[column.name], table.num_rows, number) for column in self._columns]

    def _inspect(self, column: Column, values: pa.ChunkedArray, number: int) -> None:
        """Refuses nulls and lists of another length, which Petastorm would turn into something else."""
        nulls = values.null_count
        if pa.types.is_nested(values.type):
            nulls = nulls or sum(chunk.flatten().null_count for chunk in values.chunks)
        if nulls:
            raise self._bad(column, number, f"{nulls} nulls in a row group", "none")
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            width = int(np.prod(column.shape))
            lengths = pc.list_value_length(values).to_numpy()
            if (lengths != width).any():
                wrong = lengths[lengths != width][0]
                raise self._bad(column, number, f"lists of {wrong} values", f"{width} in every row")

    def _through_petastorm(self, table: pa.Table) -> dict[str, Any]:
        self._pieces[:] = [_Piece(table)]
        try:
            self._pool.ventilate(piece_index=0, worker_predicate=None, shuffle_row_drop_partition=(0, 1))
            if not self._by_row:
                return dict(self._results.read_next(self._pool, self._schema, None)._asdict())
            rows = self._pool.get_results()
            return {column.name: [row[column.name] for row in rows] for column in self._columns}
        finally:
            self._pieces.clear()

    def _array(self, column: Column, values: Any, rows: int, number: int) -> np.ndarray:
        shapes = {np.shape(value) for value in values} if self._by_row else {np.shape(values)[1:]}
        if shapes != {column.shape}:
            wrong = next(iter(shapes - {column.shape}))
            raise self._bad(column, number, f"a value of shape {wrong}", f"{column.shape}")
        if len(values) != rows:
            raise self._bad(column, number, f"{len(values)} values", f"{rows}")
        array = np.ascontiguousarray(np.asarray(values).astype(column.dtype, copy=False))
        self._check(column, array, number)
        return array


def _without_listing(kind: Any) -> Any:
    """Returns one of Petastorm's workers as it is, but that it neither lists the data set nor opens the file."""

    class Worker(kind):
        def process(self, piece_index: int, worker_predicate: Any, shuffle_row_drop_partition: tuple[int, int]) -> None:
            self._dataset = SimpleNamespace(partitions=None)
            self.publish_func(self._load_rows(None, self._split_pieces[piece_index], shuffle_row_drop_partition))

    return Worker
