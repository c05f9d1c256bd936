"""The data set of pieces that Petastorm 0.12 asks of ``pyarrow.parquet`` and that pyarrow no longer has.

A piece is a file, or one row group of it. What is here is what Petastorm calls, over today's ``pq.ParquetFile``; it is
put in its place by ``petastorm_compat``. It is pickled with Petastorm's readers, into children of its process pool too.
"""

from __future__ import annotations

import operator
import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "not in": lambda value, wanted: value not in wanted,
}


def path_values(relative: str) -> list[tuple[str, str]]:
    """Returns the partition columns that a file's path, relative to its data set, names: ``year=2020/a.parquet``."""
    parts = (part.partition("=") for part in relative.split("/")[:-1])
    return [(name, unquote(value)) for name, equals, value in parts if equals]


def as_lists(table: pa.Table) -> pa.Table:
    """Returns a table of the types that Petastorm knows: lists and strings, not their fixed-size and large kinds."""
    fields = []
    for entry in table.schema:
        kind = entry.type
        if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
            kind = pa.list_(kind.value_type)
        elif pa.types.is_large_string(kind):
            kind = pa.string()
        elif pa.types.is_large_binary(kind):
            kind = pa.binary()
        fields.append(entry.with_type(kind))
    schema = pa.schema(fields, table.schema.metadata)
    return table if schema.equals(table.schema) else table.cast(schema)


class Partition:
    """A column that is written in the names of directories: its name and the values found, as text."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: list[str] = []

    def number(self, key: str) -> int:
        """Returns the number of a value, a new one if it was not seen before."""
        if key not in self.keys:
            self.keys.append(key)
        return self.keys.index(key)

    @property
    def dictionary(self) -> pa.Array:
        """The values by number: whole numbers if all of them are, else strings."""
        try:
            return pa.array([int(key) for key in self.keys], pa.int64())
        except ValueError:
            return pa.array(self.keys, pa.string())


class Partitions(list[Partition]):
    """The partition columns of a data set, outermost first."""

    @property
    def partition_names(self) -> set[str]:
        """Their names."""
        return {partition.name for partition in self}

    def keys_of(self, relative: str) -> list[tuple[str, int]]:
        """Returns the names and numbers of the values in a file's relative path; new ones are added."""
        keys = []
        for level, (name, value) in enumerate(path_values(relative)):
            if level == len(self):
                self.append(Partition(name))
            keys.append((name, self[level].number(value)))
        return keys


class ParquetDatasetPiece:
    """A file, or one row group of it.

    Args:
        path: its path in the file system.
        open_file_func: opens a path for reading bytes.
        row_group: number of the row group, None for the whole file.
        partition_keys: name and number of the value of each partition column.
        **options: accepted and ignored.
    """

    def __init__(
        self,
        path: str,
        open_file_func: Callable[[str], Any] | None = None,
        row_group: int | None = None,
        partition_keys: Sequence[tuple[str, int]] | None = None,
        **options: Any,
    ) -> None:
        self.path, self.row_group = path, row_group
        self.partition_keys = list(partition_keys or [])
        self._open = open_file_func or LocalFileSystem().open

    def __repr__(self) -> str:
        return f"ParquetDatasetPiece({self.path!r}, row_group={self.row_group})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParquetDatasetPiece) and (self.path, self.row_group) == (other.path, other.row_group)

    def __hash__(self) -> int:
        return hash((self.path, self.row_group))

    def get_metadata(self) -> pq.FileMetaData:
        """Returns the file's footer."""
        with self._open(self.path) as source:
            return pq.read_metadata(source)

    def read(
        self, columns: Iterable[str] | None = None, partitions: Sequence[Partition] | None = None, **options: Any
    ) -> pa.Table:
        """Returns the rows, in the order of the file's columns, those of ``partitions`` as dictionaries behind them.

        Args:
            columns: names of the columns to read, None for all; names that the file has not are left out.
            partitions: the data set's partition columns.
            **options: accepted and ignored.
        """
        with self._open(self.path) as source, pq.ParquetFile(source) as file:
            wanted = None if columns is None else set(columns)
            names = [name for name in file.schema_arrow.names if wanted is None or name in wanted]
            table = file.read(names) if self.row_group is None else file.read_row_group(self.row_group, names)
        for (name, number), partition in zip(self.partition_keys, partitions or [], strict=False):
            indices = pa.array([number] * table.num_rows, pa.int32())
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, partition.dictionary))
        return as_lists(table)


class ParquetDataset:
    """The files of a directory, or those given.

    Args:
        path_or_paths: a directory, a file, or several files.
        filesystem: an fsspec file system; None for the machine's own.
        filters: conditions ``(name, operator, value)`` on partition columns, all of which must hold, or a list of such
            lists, one of which must; those on other columns are ignored, as they were.
        **options: accepted and ignored.

    Raises:
        OSError: there are no Parquet files.
    """

    def __init__(
        self,
        path_or_paths: str | Sequence[str],
        filesystem: Any = None,
        filters: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        self.fs = LocalFileSystem() if filesystem is None else filesystem
        self.paths = path_or_paths
        self.metadata: pq.FileMetaData | None = None
        self.common_metadata: pq.FileMetaData | None = None
        self.metadata_path: str | None = None
        self.common_metadata_path: str | None = None
        partitions = Partitions()
        self.pieces: list[ParquetDatasetPiece] = []
        if isinstance(path_or_paths, str) and self.fs.isdir(path_or_paths):
            self._scan(path_or_paths, partitions)
            if not self.pieces:
                raise OSError(f"no Parquet files were found in {path_or_paths}")
        else:
            files = [path_or_paths] if isinstance(path_or_paths, str) else path_or_paths
            self.pieces = [ParquetDatasetPiece(path, self.fs.open) for path in files]
        self.partitions = partitions or None
        if filters and partitions:
            self.pieces = [piece for piece in self.pieces if _passes(piece, partitions, filters)]

    def _scan(self, folder: str, partitions: Partitions) -> None:
        # File systems differ in whether the paths that they list begin with a slash.
        root = "/" + folder.strip("/")
        for path in sorted(self.fs.find(folder)):
            relative = posixpath.relpath("/" + path.lstrip("/"), root)
            if relative == "_metadata":
                self.metadata_path = path
            elif relative == "_common_metadata":
                self.common_metadata_path = path
            hidden = any(part.startswith(("_", ".")) and "=" not in part for part in relative.split("/"))
            if not hidden and not relative.endswith(".crc"):
                self.pieces.append(ParquetDatasetPiece(path, self.fs.open, None, partitions.keys_of(relative)))
        self.metadata = self._footer(self.metadata_path)
        self.common_metadata = self._footer(self.common_metadata_path) or self.metadata

    def _footer(self, path: str | None) -> pq.FileMetaData | None:
        if path is None:
            return None
        with self.fs.open(path) as source:
            return pq.read_metadata(source)


def _passes(piece: ParquetDatasetPiece, partitions: Partitions, filters: Sequence[Any]) -> bool:
    values = {
        name: partition.dictionary[number].as_py()
        for (name, number), partition in zip(piece.partition_keys, partitions, strict=False)
    }

    def holds(name: str, compare: str, wanted: Any) -> bool:
        if name not in values:
            return True
        value = values[name]
        if not isinstance(wanted, (list, set, tuple)):
            wanted = type(value)(wanted)
        return _COMPARE[compare](value, wanted)

    either = filters if isinstance(filters[0], list) else [filters]
    return any(all(holds(*condition) for condition in every) for every in either)
