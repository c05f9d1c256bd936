"""What runs in Spark's tasks while a DataFrame is prepared: one pass that checks, splits and writes Parquet.

Each task writes its own files, named by partition and attempt, and yields one small report. Only the files of reports
that reached the driver get into the manifest, so retries and speculative copies of a task duplicate nothing.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import socket
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparkvod import log
from sparkvod.data import files
from sparkvod.data.ranges import Range, of_values
from sparkvod.data.schema import TEXT, Column, arrow_field, invalid_utf8, row_nbytes
from sparkvod.data.store import FilesystemStore

GROUP_ROWS = 4096
GROUP_BYTES = 4 << 20
GROUPS_PER_FILE = 64
"""Few enough that opening a file for one group costs no more than decoding the group."""
PARTITION_GROUPS = (16, 32)
"""Row groups of a partition: at least, even if they get fewer than 1,024 rows; at most, until they are full."""
HOLD_BYTES = 64 << 20
"""Bytes that a task holds before it decides on the size of its row groups."""

Arrays = dict[str, np.ndarray]
_log = log.get("data")


@dataclass(frozen=True)
class WritePlan:
    """What a task must know. Picklable.

    Attributes:
        store: where to write.
        train_path: directory of training data.
        val_path: directory of validation data.
        columns: the columns to write; widths of vectors are found.
        weight: name of the column of sample weights, which must not be negative.
        split: name of the column that says which rows are for validation.
        fraction: else the fraction of rows for validation.
        seed: decides which rows these are.
        labels: the columns whose range of values is noted, as that of the weights is.
    """

    store: FilesystemStore
    train_path: str
    val_path: str
    columns: tuple[Column, ...]
    weight: str | None
    split: str | None
    fraction: float
    seed: int
    labels: tuple[str, ...] = ()


class Checks:
    """Counts of what is wrong with the data, the widths of vectors, and the ranges of labels and weights.

    Attributes:
        problems: column -> kind of problem -> number of rows.
        widths: vector column -> width -> number of rows.
        infinite: column of numbers -> number of rows with an infinity, which is no error.
        ranges: label -> range of its values.
    """

    def __init__(self) -> None:
        self.problems: dict[str, Counter[str]] = {}
        self.infinite: Counter[str] = Counter()
        self.widths: dict[str, Counter[int]] = {}
        self.ranges: dict[str, Range] = {}

    @property
    def ok(self) -> bool:
        """True as long as everything seen can be written to one file."""
        return not self.problems and all(len(found) == 1 and 0 not in found for found in self.widths.values())

    def note(self, column: str, kind: str, rows: int) -> None:
        """Counts rows with a problem."""
        if rows:
            self.problems.setdefault(column, Counter())[kind] += int(rows)

    def note_range(self, column: str, values: np.ndarray) -> None:
        """Notes the values of a label or weight, which have been found to be good."""
        found = of_values(values)
        self.ranges[column] = found.merged(self.ranges[column]) if column in self.ranges else found

    def scalar(self, column: Column, array: pa.Array) -> np.ndarray:
        """Checks a scalar column and returns it as [rows]."""
        self.note(column.name, "nulls", array.null_count)
        if array.null_count:
            array = array.drop_null()
        try:
            values: np.ndarray = array.to_numpy(zero_copy_only=False)
        except (UnicodeDecodeError, pa.ArrowException):
            self.note(column.name, "text that is not valid UTF-8", invalid_utf8(array))
            return np.empty(0, column.dtype)
        if column.is_float:
            self._note_not_finite(column, values)
        return values

    def _note_not_finite(self, column: Column, values: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Counts rows with NaN or infinities; ``lengths`` are those of the vectors that ``values`` are in."""
        if np.isfinite(values).all():
            return
        for kind, found in (("NaN", np.isnan(values)), ("infinite", np.isinf(values))):
            rows = np.flatnonzero(found) if lengths is None else np.repeat(np.arange(len(lengths)), lengths)[found]
            count = len(np.unique(rows))
            if kind == "NaN":
                self.note(column.name, kind, count)
            else:
                self.infinite[column.name] += count

    def vector(self, column: Column, array: pa.Array) -> np.ndarray:
        """Checks a vector column and returns it as [rows, width], [0, 1] when that cannot be done."""
        self.note(column.name, "nulls", array.null_count)
        if array.null_count:
            array = array.drop_null()
        lengths = np.asarray(pc.list_value_length(array))
        widths = self.widths.setdefault(column.name, Counter())
        for width, rows in zip(*np.unique(lengths, return_counts=True), strict=True):
            widths[int(width)] += int(rows)
        elements = array.flatten()
        if elements.null_count:
            missing = np.asarray(pc.is_null(elements))
            self.note(column.name, "nulls inside", len(np.unique(np.repeat(np.arange(len(lengths)), lengths)[missing])))
            return np.empty((0, 1), column.dtype)
        values: np.ndarray = elements.to_numpy(zero_copy_only=False)
        if column.is_float:
            self._note_not_finite(column, values, lengths)
        if len(lengths) == 0 or (lengths != lengths[0]).any():
            return np.empty((0, 1), column.dtype)
        return values.reshape(len(lengths), int(lengths[0]))


class Splitter:
    """Decides which rows are for validation: by the split column, or so many of each stretch of rows, chosen at random.

    With a fraction f, a partition that has given n rows has given ``floor(n*f + phase)`` of them for validation, where
    the partitions' phases are spread evenly over [0, 1): the total is within a row or so of the fraction, however the
    data are partitioned.
    """

    def __init__(self, plan: WritePlan, partition: int) -> None:
        self._plan = plan
        self._random = np.random.default_rng([plan.seed % (1 << 63), partition])
        self._phase = (0.5 + (partition + plan.seed % 1024) * 0.6180339887498949) % 1.0
        self._seen = self._chosen = 0

    def mask(self, batch: pa.RecordBatch, checks: Checks) -> np.ndarray | None:
        """Returns which rows of a batch are for validation, None when none can be."""
        if self._plan.split is not None:
            names = [column.name for column in self._plan.columns]
            array = batch.column(names.index(self._plan.split) if self._plan.split in names else len(names))
            checks.note(self._plan.split, "nulls", array.null_count)
            return np.asarray(array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)) > 0
        if not self._plan.fraction:
            return None
        self._seen += batch.num_rows
        wanted = int(self._seen * self._plan.fraction + self._phase) - self._chosen
        mask = np.zeros(batch.num_rows, dtype=bool)
        mask[self._random.permutation(batch.num_rows)[:wanted]] = True
        self._chosen += int(mask.sum())
        return mask


class GroupWriter:
    """Collects rows and writes them as row groups of even size, into files of some groups each.

    How large the groups are is decided when the rows end, or when enough are held: a small partition is cut into many
    small groups, so that there is something for every lane, a large one into full groups.
    """

    def __init__(self, plan: WritePlan, path: str, name: str) -> None:
        self._store, self._path, self._name = plan.store, path, name
        self._columns = list(plan.columns)
        self._held: deque[Arrays] = deque()
        self._rows = self._group_rows = 0
        self._limit = GROUP_ROWS
        self._file: Any = None
        self._writer: pq.ParquetWriter | None = None
        self.files: list[dict[str, Any]] = []

    def add(self, rows: Arrays) -> None:
        """Takes rows; writes groups when there are enough."""
        count = len(next(iter(rows.values())))
        if not count:
            return
        if not self._rows and not self.files:
            self._columns = [c.with_width(rows[c.name].shape[1]) if c.kind == "vector" else c for c in self._columns]
            self._limit = max(1, min(GROUP_ROWS, GROUP_BYTES // row_nbytes(self._columns)))
        self._held.append(rows)
        self._rows += count
        most = PARTITION_GROUPS[1]
        held = self._rows * row_nbytes(self._columns)
        if not self._group_rows and (self._rows >= most * self._limit or held >= HOLD_BYTES):
            self._group_rows = min(self._limit, -(-self._rows // most))
        # Two groups stay behind, so that what is left at the end can be cut evenly.
        while self._group_rows and self._rows >= 3 * self._group_rows:
            self._write(self._group_rows)

    def finish(self) -> list[dict[str, Any]]:
        """Writes what is held and returns the files: name, size and groups [rows, digest] of each."""
        total = self._rows
        if self._group_rows:
            pieces = -(-total // self._group_rows)
        else:
            least, most = PARTITION_GROUPS
            pieces = max(-(-total // self._limit), min(total, max(total // 1024, least), most))
        for piece in range(pieces):
            self._write(total * (piece + 1) // pieces - total * piece // pieces)
        self._close()
        return self.files

    def _write(self, rows: int) -> None:
        arrays = self._pop(rows)
        fields = [arrow_field(column) for column in self._columns]
        if self._writer is None:
            name = f"{self._name}-{len(self.files):04d}.parquet"
            self.files.append({"name": name, "size": 0, "groups": []})
            self._file = files.open_to_write(self._store.fs, posixpath.join(self._path, name))
            self._writer = pq.ParquetWriter(
                self._file, pa.schema(fields), compression="lz4", use_dictionary=False, write_statistics=False
            )
        columns, digest = [], hashlib.blake2b(digest_size=12)
        for field, column in zip(fields, self._columns, strict=True):
            values = np.ascontiguousarray(arrays[column.name])
            flat = pa.array(values.reshape(-1), field.type if column.dtype == TEXT else None)
            for buffer in flat.buffers()[1:] if column.dtype == TEXT else [values.reshape(-1).data]:
                digest.update(buffer)
            columns.append(
                flat if column.kind == "scalar" else pa.FixedSizeListArray.from_arrays(flat, type=field.type)
            )
        self._writer.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), row_group_size=rows)
        groups = self.files[-1]["groups"]
        groups.append([rows, digest.hexdigest()])
        if len(groups) == GROUPS_PER_FILE:
            self._close()

    def _pop(self, rows: int) -> Arrays:
        """Takes the first ``rows`` rows out of what is held."""
        parts: list[Arrays] = []
        self._rows -= rows
        while rows:
            first = self._held.popleft()
            count = len(next(iter(first.values())))
            if count > rows:
                self._held.appendleft({name: values[rows:] for name, values in first.items()})
                first = {name: values[:rows] for name, values in first.items()}
            parts.append(first)
            rows -= min(count, rows)
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self.files[-1]["size"] = int(self._file.tell())  # what the store's listing may not tell yet
            self._file.close()
            self._writer = None

    def discard(self) -> None:
        """Deletes what was written."""
        try:
            self._close()
        finally:
            self._held.clear()
            self._rows = 0
            for entry in self.files:
                self._store.delete_file(posixpath.join(self._path, entry["name"]))
            self.files = []


def make_task(plan: WritePlan) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns the function for ``DataFrame.mapInArrow``: it writes a partition and yields its report, JSON in one row.

    The report holds ``partition``, ``rows``, ``problems``, ``widths``, ``ranges``, ``train`` and ``val`` (lists of
    files), and ``error`` when the store could not be written. When there are problems no file is left.
    """

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        name = f"part-{partition:05d}-{uuid.uuid4().hex[:12]}"
        report = write_partition(plan, batches, partition, name)
        yield pa.RecordBatch.from_arrays([pa.array([json.dumps(report)])], names=["report"])

    return task


def write_partition(plan: WritePlan, batches: Iterable[pa.RecordBatch], partition: int, name: str) -> dict[str, Any]:
    """Checks, splits and writes one partition, and returns its report; see :func:`make_task`.

    Args:
        plan: what to write.
        batches: the partition's rows, columns in the plan's order and then the split column, if it is none of them;
            they are taken once.
        partition: its number.
        name: beginning of the names of its files, different for each attempt.
    """
    checks, splitter = Checks(), Splitter(plan, partition)
    writers = {
        "train": GroupWriter(plan, plan.train_path, name),
        "val": GroupWriter(plan, plan.val_path, name),
    }
    report: dict[str, Any] = {"partition": partition, "rows": 0, "train": [], "val": [], "error": None}
    try:
        for batch in batches:
            report["rows"] += batch.num_rows
            _take(plan, batch, checks, splitter, writers)
        if checks.ok:
            try:
                report |= {part: writer.finish() for part, writer in writers.items()}
            except plan.store.failures as error:
                raise _WriteError(error) from error
    except _WriteError as error:
        _discard(plan, writers)
        report["error"] = f"{error.cause} on {socket.gethostname()}"
    except BaseException:
        _discard(plan, writers)
        raise
    if not checks.ok:
        _discard(plan, writers)
    report["problems"] = checks.problems
    report["widths"] = {column: list(found.items()) for column, found in checks.widths.items()}
    report["infinite"] = checks.infinite
    report["ranges"] = {column: found.to_json() for column, found in checks.ranges.items()}
    return report


class _WriteError(Exception):
    """The store could not be written; errors of the rows' own evaluation are something else."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = f"{type(cause).__name__}: {cause}"


def _take(
    plan: WritePlan, batch: pa.RecordBatch, checks: Checks, splitter: Splitter, writers: dict[str, GroupWriter]
) -> None:
    """Checks one batch and, as long as all is well, hands its rows to the writers."""
    if not batch.num_rows:
        return
    rows: Arrays = {}
    for column, array in zip(plan.columns, batch.columns, strict=False):
        rows[column.name] = checks.scalar(column, array) if column.kind == "scalar" else checks.vector(column, array)
    if plan.weight is not None:
        checks.note(plan.weight, "negative values", (rows[plan.weight] < 0).sum())
    mask = splitter.mask(batch, checks)
    if not checks.ok:
        return
    for name in dict.fromkeys([*plan.labels, *filter(None, [plan.weight])]):
        checks.note_range(name, rows[name])
    try:
        if mask is None:
            writers["train"].add(rows)
        else:
            writers["train"].add({name: values[~mask] for name, values in rows.items()})
            writers["val"].add({name: values[mask] for name, values in rows.items()})
    except plan.store.failures as error:
        raise _WriteError(error) from error


def _discard(plan: WritePlan, writers: dict[str, GroupWriter]) -> None:
    for writer in writers.values():
        try:
            writer.discard()
        except plan.store.failures as error:  # what stays is in no manifest, and the driver deletes it
            _log.warning("files of an abandoned task could not be deleted: %s", error)
