"""Data sets in a store: files, row groups, columns, and the manifest that makes a prepared one valid.

The manifest (``_sparkvod.json`` in the training directory) is written last and atomically: without it nothing is
prepared. A directory of Parquet files written by others has none; its metadata come from the files' footers.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkvod import log
from sparkvod.data import unischema
from sparkvod.data.claims import CLAIM
from sparkvod.data.ranges import Range, merged, of_statistics
from sparkvod.data.schema import Column, from_arrow, row_nbytes, unconvertible
from sparkvod.data.store import FilesystemStore, is_data_file
from sparkvod.errors import DataError

VERSION = 1
PREPARED = re.compile(r"part-\d{5}-[0-9a-f]{12}-\d{4}\.parquet")
"""Names of files that tasks write: beside those of a manifest they are of tasks that were repeated."""
_log = log.get("data")


@dataclass(frozen=True)
class RowGroup:
    """A row group: number of its file, its number in that file, its rows, its decoded bytes."""

    file: int
    index: int
    rows: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """A set of Parquet files with what a reader must know before it opens one. Picklable.

    Attributes:
        path: directory, a URL or an absolute local path.
        files: names of the files in ``path``, in the order of the data.
        groups: int64 array [row groups, 4], the columns being those of :class:`RowGroup`, in the order of the data.
        columns: the columns that can become tensors.
        checked: True when nulls, NaN and widths were checked when it was written; else readers check.
        fingerprint: digest of the content, in order, for data that we prepared; of names, sizes and rows for others'.
        refused: the columns that cannot be used, each with the message that says why and what to do.
        storage_options: options of the fsspec file system.
        codecs: for data that Petastorm wrote with a Unischema, the columns that only Petastorm can decode, each with
            its codec; None for plain Parquet.
        ranges: what is known of the values of columns, by name: for data that we prepared, of the labels in training
            and validation data together; for others', what the files' footers tell of columns of numbers.
    """

    path: str
    files: tuple[str, ...]
    groups: np.ndarray
    columns: tuple[Column, ...]
    checked: bool
    fingerprint: str
    refused: dict[str, str] = field(default_factory=dict)
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)
    codecs: dict[str, str] | None = None
    ranges: dict[str, Range] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.groups[:, 2].sum())

    @property
    def row_groups(self) -> list[RowGroup]:
        """The row groups, in the order of the data."""
        return [RowGroup(*values) for values in self.groups.tolist()]

    def column(self, name: str) -> Column:
        """Returns the column ``name``.

        Raises:
            DataError: there is none, or it cannot become a tensor.
        """
        for column in self.columns:
            if column.name == name:
                return column
        names = ", ".join(c.name for c in self.columns)
        if name in self.refused:
            raise DataError(self.refused[name])
        raise DataError(f"no column {name!r} in {self.path}; the columns are {names}")


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Training and validation data in a store, ready for readers. Picklable.

    Attributes:
        idx: number of the data set in the store, None for the directories without a number.
        train: the training data.
        val: the validation data, None when there are none.
        schema: the columns of both.
        reused: True when an earlier identical preparation was taken.
    """

    idx: int | None
    train: Dataset
    val: Dataset | None
    schema: list[Column]
    reused: bool = False

    @property
    def fingerprint(self) -> str:
        """Digest of the content of training and validation data: equal data in equal order, equal digest."""
        return digest([self.train.fingerprint, self.val.fingerprint if self.val else ""])

    @property
    def ranges(self) -> dict[str, Range]:
        """What is known of the values of columns, by name."""
        return merged(self.train.ranges, self.val.ranges if self.val else {})

    def column(self, name: str) -> Column:
        """Returns the column ``name`` of both, or raises ``DataError``."""
        return self.train.column(name)


def digest(parts: Iterable[Any]) -> str:
    """Returns a hexadecimal digest of things that ``json.dumps`` takes."""
    return hashlib.blake2b(json.dumps(list(parts)).encode(), digest_size=16).hexdigest()


def make_dataset(
    store: FilesystemStore, path: str, files: list[dict[str, Any]], columns: list[Column], **kwargs: Any
) -> Dataset:
    """Returns the data set of files that we wrote.

    Args:
        store: the store.
        path: their directory.
        files: for each file its ``name``, ``size`` in bytes and ``groups``: [rows, digest of the content] of each.
        columns: the columns.
        **kwargs: more attributes of :class:`Dataset`.
    """
    width = row_nbytes(columns)
    groups = [
        (number, index, rows, rows * width)
        for number, entry in enumerate(files)
        for index, (rows, _) in enumerate(entry["groups"])
    ]
    return Dataset(
        path=path,
        files=tuple(entry["name"] for entry in files),
        groups=np.array(groups, dtype=np.int64).reshape(-1, 4),
        columns=tuple(columns),
        checked=True,
        fingerprint=digest([[c.to_json() for c in columns], [entry["groups"] for entry in files]]),
        storage_options=store.storage_options,
        **kwargs,
    )


def write_manifest(store: FilesystemStore, path: str, content: dict[str, Any]) -> None:
    """Writes the manifest of the data set in ``path``; from then on it is valid."""
    store.write_text(store.get_data_metadata_path(path), json.dumps({"version": VERSION, **content}))


def read_manifest(store: FilesystemStore, idx: int | None) -> PreparedData | None:
    """Returns the data set that the manifest of ``idx`` describes.

    Returns:
        None when there is no manifest, when it is damaged, or when it does not fit the files that are there: it is
        never trusted alone.
    """
    path = store.get_data_metadata_path(store.get_train_data_path(idx))
    try:
        content = json.loads(store.read(path))
        if content["version"] != VERSION:
            return None
        return _described(store, idx, content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        _log.warning("%s is damaged and is not used (%s: %s)", path, type(error).__name__, error)
        return None


def _described(store: FilesystemStore, idx: int | None, content: dict[str, Any]) -> PreparedData | None:
    """Returns the data set that a manifest's content describes, None when its files are others."""
    columns = [Column.from_json(value) for value in content["columns"]]
    ranges = {name: Range.from_json(value) for name, value in content.get("ranges", {}).items()}
    paths = {"train": store.get_train_data_path(idx), "val": store.get_val_data_path(idx)}
    sets: dict[str, Dataset | None] = {}
    for part, path in paths.items():
        files = content[part]
        strangers, absent = compare(store, path, files or [])
        if absent or any(is_data_file(name) and not PREPARED.fullmatch(name) for name in strangers):
            _log.warning("the files in %s are not those that its metadata list; the metadata are not used", path)
            return None
        sets[part] = make_dataset(store, path, files, columns, ranges=ranges) if files else None
    if sets["train"] is None:
        return None
    return PreparedData(idx, sets["train"], sets["val"], columns)


def compare(store: FilesystemStore, path: str, files: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Compares the files that ought to be in a directory with those that are.

    Those that a listing does not show, or shows with another size, are opened: listings may be behind.

    Returns:
        The names that were found beside them, and the names of those that are not there in their size.
    """
    there = store.listing(path)
    expected = {entry["name"]: entry["size"] for entry in files}
    doubtful = [name for name, size in expected.items() if there.get(name) != size]
    with ThreadPoolExecutor(16) as pool:
        sizes = pool.map(lambda name: store.size(posixpath.join(path, name)), doubtful)
        absent = [name for name, size in zip(doubtful, sizes, strict=True) if size != expected[name]]
    return [name for name in there if name not in expected], absent


def open_prepared(store: FilesystemStore, idx: int | None = None, text: bool = False) -> PreparedData:
    """Returns the data in the store's training and validation directories, prepared by us or written by others.

    Args:
        store: the store.
        idx: number of the data set; None: the directories without a number.
        text: whether columns of text are taken.

    Raises:
        DataError: there are no Parquet files or no rows, the files' columns differ, or a preparation has not ended.
    """
    prepared = read_manifest(store, idx)
    if prepared is not None:
        return prepared
    path = store.get_train_data_path(idx)
    if store.exists(posixpath.join(path, CLAIM)) and not store.exists(store.get_data_metadata_path(path)):
        raise DataError(
            f"the preparation of {path} has not ended (another driver is at it, or was ended), complete data were "
            "expected; wait for it, or prepare again"
        )
    train = from_footers(store, store.get_train_data_path(idx), text)
    val_path = store.get_val_data_path(idx)
    val = from_footers(store, val_path, text) if store.is_parquet_dataset(val_path) else None
    if val is not None and {c.name: c.dtype for c in val.columns} != {c.name: c.dtype for c in train.columns}:
        raise DataError(
            f"the columns of {val_path} are {[f'{c.name}: {c.dtype}' for c in val.columns]}, those of the training "
            f"data {[f'{c.name}: {c.dtype}' for c in train.columns]} were expected; write both from one DataFrame"
        )
    return PreparedData(idx, train, val, list(train.columns))


def from_footers(store: FilesystemStore, path: str, text: bool = False) -> Dataset:
    """Returns the data set of Parquet files that somebody else wrote, from their footers alone.

    The width of a list column is the number of its values divided by that of its rows, when this is the same whole
    number in every group; readers check each row.

    Raises:
        DataError: no files, no rows, or different columns. Columns with nulls or with lists of unequal length, as far
            as footers tell, are only refused.
    """
    names = sorted(name for name in store.listing(path) if is_data_file(name))
    if not names:
        raise DataError(f"no Parquet files in {path}; write a DataFrame there, or use fit() on a DataFrame")
    root = store.get_localized_path(path)

    def footer(name: str) -> tuple[Any, pq.FileMetaData]:
        where = posixpath.join(root, name)
        try:
            with store.fs.open(where, "rb") as file, pq.ParquetFile(file) as parquet:
                return parquet.schema_arrow, parquet.metadata
        except (*store.failures, pa.ArrowException) as error:
            raise DataError(
                f"{where} is not a readable Parquet file ({error}): it may be empty, cut off or damaged; write it "
                "again, or delete it"
            ) from error

    with ThreadPoolExecutor(16) as pool:
        footers = list(pool.map(footer, names))
    schema = footers[0][0]
    columns, refused, codecs = _columns(store, path, schema, text)
    groups: list[tuple[int, int, int, int]] = []
    nulls: Counter[str] = Counter()
    widths: dict[str, set[float]] = {c.name: set() for c in columns if c.shape == (-1,)}
    ranges: dict[str, Range] = {}
    plain = {c.name for c in columns if c.kind == "scalar"} - {*(codecs or {})}
    for number, (name, (found, metadata)) in enumerate(zip(names, footers, strict=True)):
        if [(f.name, f.type) for f in found] != [(f.name, f.type) for f in schema]:
            raise DataError(
                f"the columns of {name} in {path} are {_fields(found)}, those of {names[0]}, {_fields(schema)}, were "
                "expected; write all files from one DataFrame"
            )
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            _inspect(group, widths, nulls)
            ranges = merged(ranges, _ranges(group, plain))
            groups.append((number, index, group.num_rows, 0))
    for name, values in widths.items():
        if len(values) > 1 or any(value != int(value) or value < 1 for value in values):
            refused[name] = (
                f"the lists of column {name!r} in {path} have {sorted(values)[:5]} values per row on average, one "
                "length for all rows was expected; pad or cut them to one length, or leave the column out"
            )
    for name, count in nulls.items():
        refused[name] = f"column {name!r} in {path} has {count} nulls, none was expected; fill them or drop these rows"
    usable = [
        c.with_width(int(next(iter(widths[c.name])))) if widths.get(c.name) else c
        for c in columns
        if c.name not in refused
    ]
    table = np.array(groups, dtype=np.int64).reshape(-1, 4)
    table[:, 3] = table[:, 2] * row_nbytes(usable)
    dataset = Dataset(
        path=path,
        files=tuple(names),
        groups=table,
        columns=tuple(usable),
        checked=False,
        fingerprint=digest([sorted(store.listing(path).items()), groups]),
        refused=refused,
        storage_options=store.storage_options,
        codecs=codecs,
        ranges=ranges,
    )
    if dataset.rows == 0:
        raise DataError(f"the Parquet files in {path} have no rows; at least one was expected")
    return dataset


def _columns(
    store: FilesystemStore, path: str, schema: pa.Schema, text: bool
) -> tuple[list[Column], dict[str, str], dict[str, str] | None]:
    """Returns the columns of a schema that can become tensors, why the others cannot, and :attr:`Dataset.codecs`."""
    found = unischema.find(store, path)
    if found is not None:
        return unischema.columns(found, schema)
    columns, refused = [], {}
    for entry in schema:
        column = from_arrow(entry.name, entry.type, text)
        if column is None:
            refused[entry.name] = str(unconvertible(entry.name, str(entry.type)))
        else:
            columns.append(column)
    return columns, refused, None


def _fields(schema: Any) -> list[str]:
    return [f"{entry.name}: {entry.type}" for entry in schema]


def _inspect(group: pq.RowGroupMetaData, widths: dict[str, set[float]], nulls: Counter[str]) -> None:
    """Notes the widths of lists and counts nulls, as far as a row group's metadata tell."""
    for number in range(group.num_columns):
        chunk = group.column(number)
        name = chunk.path_in_schema.removesuffix(".list.element").removesuffix(".list.item")
        if name in widths and group.num_rows:
            widths[name].add(chunk.num_values / group.num_rows)
        # In a list, footers count empty rows as nulls: readers tell them apart.
        if (
            name not in widths
            and chunk.statistics is not None
            and chunk.statistics.has_null_count
            and chunk.statistics.null_count
        ):
            nulls[name] += chunk.statistics.null_count


def _ranges(group: pq.RowGroupMetaData, names: set[str]) -> dict[str, Range]:
    """Returns the ranges of columns of numbers, as far as a row group's statistics tell."""
    found: dict[str, Range] = {}
    for number in range(group.num_columns):
        chunk = group.column(number)
        statistics = chunk.statistics if chunk.path_in_schema in names else None
        values = of_statistics(statistics.min, statistics.max) if statistics and statistics.has_min_max else None
        if values is not None:
            found[chunk.path_in_schema] = values
    return found
