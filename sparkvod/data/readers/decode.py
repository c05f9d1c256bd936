"""Decodes row groups of Parquet files into numpy arrays."""

from __future__ import annotations

import posixpath
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from sparkvod.data.dataset import Dataset
from sparkvod.data.files import failures
from sparkvod.data.schema import Column, require_utf8
from sparkvod.errors import DataError

OPEN_CHUNKS = 20_000
"""Column chunks whose metadata are kept in open files: half a kilobyte each."""
STREAM_BUFFER = 64 << 10
"""Bytes read ahead per column of a row group that is decoded part by part."""


class _Handle(NamedTuple):
    """An open file, which one thread uses at a time, and what of it is wanted.

    Attributes:
        columns: numbers of the Parquet columns that are wanted.
        ordered: whether these come out in the order in which they are asked for.
        chunks: column chunks of the file.
    """

    file: pq.ParquetFile
    source: Any
    columns: list[int]
    ordered: bool
    chunks: int

    def table(self, names: list[str], table: pa.Table) -> pa.Table:
        """Returns what was read with its columns in the order in which they are asked for."""
        return table if self.ordered else table.select(names)

    def close(self) -> None:
        self.file.close()
        self.source.close()


class Decoder:
    """Decodes a data set's row groups, in any threads; keeps files open as long as their metadata are not too much.

    Args:
        dataset: the data set.
        columns: the columns to decode.

    Attributes:
        remote: whether reading a file means to wait for another machine.
    """

    def __init__(self, dataset: Dataset, columns: Sequence[Column]) -> None:
        self._dataset, self._columns = dataset, columns
        self._names = [column.name for column in columns]
        self._plain = dataset.checked and all(c.kind == "scalar" and c.dtype != "bool" for c in columns)
        self._fs, self._root = url_to_fs(dataset.path, **dataset.storage_options)
        self._local = isinstance(self._fs, LocalFileSystem)
        self.remote = not self._local and not isinstance(self._fs, MemoryFileSystem)
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[_Handle]] = OrderedDict()
        self._idle_chunks = 0
        self._metadata: weakref.WeakValueDictionary[int, pq.FileMetaData] = weakref.WeakValueDictionary()

    def decode(self, group: int) -> list[np.ndarray]:
        """Decodes a row group.

        Returns:
            The arrays of the columns, [rows] or [rows, width], read-only where they share Arrow's memory.

        Raises:
            DataError: the file is gone or has changed, or (in files that others wrote) a value is null, NaN or of
                another length.
        """
        number, index, rows, _ = self._dataset.groups[group].tolist()
        handle = self._borrow(number)
        try:
            # ParquetFile.read_row_group() looks the columns up by name each time, for half the time of decoding them.
            # use_threads=False: starting tasks costs more than decoding a group of some thousand rows.
            table = handle.file.reader.read_row_group(index, column_indices=handle.columns, use_threads=False)
        except (*failures(self._fs), pa.ArrowException) as error:
            raise self._damaged(number, index, error) from error
        finally:
            self._give_back(number, handle)
        if table.num_rows != rows:
            raise self._changed(number, index, table.num_rows, rows)
        return self._arrays(handle.table(self._names, table), number)

    def stream(self, group: int, sizes: list[int]) -> Iterator[list[np.ndarray]]:
        """Decodes a row group part by part, holding little of it at a time.

        Args:
            group: the row group.
            sizes: rows of each part; together they are the group's.

        Yields:
            What :meth:`decode` returns, for each part.

        Raises:
            DataError: as :meth:`decode`.
        """
        number, index, _, _ = self._dataset.groups[group].tolist()
        handle = self._opened(number, buffer_size=STREAM_BUFFER)
        try:
            batches = handle.file.iter_batches(max(sizes), row_groups=[index], columns=self._names, use_threads=False)
            held: pa.Table | None = None
            for size in sizes:
                while held is None or held.num_rows < size:
                    try:
                        batch = next(batches, None)
                    except (*failures(self._fs), pa.ArrowException) as error:
                        raise self._damaged(number, index, error) from error
                    if batch is None:
                        raise self._changed(number, index, "fewer", "more")
                    more = pa.Table.from_batches([batch])
                    held = more if held is None else pa.concat_tables([held, more])
                yield self._arrays(handle.table(self._names, held.slice(0, size)), number)
                held = held.slice(size)
        finally:
            handle.close()

    def _arrays(self, table: pa.Table, number: int) -> list[np.ndarray]:
        if self._plain:
            # Nothing to look for: one call per column, which counts when there are many.
            return [column.to_numpy() for column in table.columns]
        found = []
        for column, values in zip(self._columns, table.columns, strict=True):
            parts = [self._values(column, chunk, number) for chunk in values.chunks]
            found.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return found

    def _values(self, column: Column, array: pa.Array, file: int) -> np.ndarray:
        if column.kind == "vector":
            return self._vectors(column, array, file)
        if array.null_count:
            raise self._bad(column, file, f"{array.null_count} nulls in a row group", "none")
        try:
            values: np.ndarray = array.to_numpy(zero_copy_only=False)
        except (UnicodeDecodeError, pa.ArrowException):
            require_utf8(column.name, array)
            raise
        self._check(column, values, file)
        return values

    def _vectors(self, column: Column, array: pa.Array, file: int) -> np.ndarray:
        rows, width = len(array), column.shape[0]
        elements = array.flatten()
        if array.null_count or elements.null_count:
            raise self._bad(column, file, f"{array.null_count or elements.null_count} nulls in a row group", "none")
        if not pa.types.is_fixed_size_list(array.type):
            lengths = np.diff(array.offsets.to_numpy())
            if (lengths != width).any():
                raise self._bad(
                    column, file, f"lists of {lengths[lengths != width][0]} values", f"{width} in every row"
                )
        values: np.ndarray = elements.to_numpy(zero_copy_only=False)
        self._check(column, values, file)
        return values.reshape(rows, width)

    def _check(self, column: Column, values: np.ndarray, file: int) -> None:
        if not self._dataset.checked and column.is_float and np.isnan(values).any():
            raise self._bad(column, file, f"{int(np.isnan(values).sum())} NaN in a row group", "none")

    def _changed(self, file: int, index: int, found: object, expected: object) -> DataError:
        return DataError(
            f"row group {index} of {self._name(file)} has {found} rows, {expected} were expected; the file was "
            "changed since its metadata were read: prepare or open the data again"
        )

    def _damaged(self, file: int, index: int, error: Exception) -> DataError:
        return DataError(
            f"row group {index} of {self._name(file)} cannot be read ({error}): the file is damaged or was changed "
            "since its metadata were read; write it again, or prepare the data again"
        )

    def _bad(self, column: Column, file: int, found: str, expected: str) -> DataError:
        return DataError(
            f"column {column.name!r} in {self._name(file)} has {found}, {expected} was expected; correct or drop "
            "these rows and write the file again"
        )

    def _name(self, number: int) -> str:
        return posixpath.join(self._root, self._dataset.files[number])

    def _borrow(self, number: int) -> _Handle:
        """Returns an open file for the caller alone."""
        with self._lock:
            handles = self._idle.get(number)
            if handles:
                handle = handles.pop()
                if not handles:
                    del self._idle[number]
                self._idle_chunks -= handle.chunks
                return handle
        return self._opened(number)

    def _give_back(self, number: int, handle: _Handle) -> None:
        """Keeps a file open for later, and closes those that were not used for longest if these are too many."""
        with self._lock:
            self._idle.setdefault(number, []).append(handle)
            self._idle.move_to_end(number)
            self._idle_chunks += handle.chunks
            while len(self._idle) > 1 and self._idle_chunks > OPEN_CHUNKS:
                for old in self._idle.popitem(last=False)[1]:
                    self._idle_chunks -= old.chunks
                    old.close()

    def _opened(self, number: int, buffer_size: int = 0) -> _Handle:
        path = self._name(number)
        try:
            source = self._source(path, bool(buffer_size))
            file = pq.ParquetFile(
                source,
                metadata=self._metadata.get(number),  # of another thread, which has the file open too
                buffer_size=buffer_size,
                pre_buffer=not self._local and not buffer_size,
            )
        except (*failures(self._fs), pa.ArrowInvalid) as error:
            raise DataError(
                f"{path} cannot be read ({error}), a Parquet file of the data set was expected; it must be reachable "
                "from every "
                "worker: use a store that all of them share, and do not delete prepared data while they are in use"
            ) from error
        self._metadata[number] = file.metadata
        wanted = set(self._names)
        columns, found = [], []
        for index in range(file.metadata.num_columns):
            # A list's column is x.list.element; and a name may have dots itself.
            steps = file.schema.column(index).path.split(".")
            names = [name for end in range(1, len(steps) + 1) if (name := ".".join(steps[:end])) in wanted]
            if names:
                columns.append(index)
                found += names
        chunks = file.num_row_groups * file.metadata.num_columns
        return _Handle(file, source, columns, found == self._names, chunks)

    def _source(self, path: str, stream: bool) -> Any:
        if self._local:
            return pa.OSFile(path, "rb")
        if isinstance(self._fs, MemoryFileSystem):
            # Its open files of one path are one object, with one position.
            return pa.BufferReader(self._fs.cat_file(path))
        if isinstance(self._fs, AsyncFileSystem) and not stream:
            # Arrow asks for a row group's columns at once. By default an object store's file would fetch five MiB more
            # each time, of which a reader in random order uses nothing.
            return self._fs.open(path, "rb", cache_type="none")
        return self._fs.open(path, "rb")

    def close(self) -> None:
        """Closes all files."""
        with self._lock:
            handles = [handle for handles in self._idle.values() for handle in handles]
            self._idle.clear()
            self._idle_chunks = 0
        for handle in handles:
            handle.close()
