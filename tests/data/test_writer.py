"""What a task does with its partition, without Spark."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.data import FilesystemStore, writer
from sparkvod.data.preparation import _judge
from sparkvod.data.request import Request
from sparkvod.data.schema import TEXT, Column, from_arrow
from sparkvod.data.writer import WritePlan, write_partition
from sparkvod.errors import DataError, StoreError

NAN, INF = float("nan"), float("inf")


def columns_of(table: pa.Table) -> tuple[Column, ...]:
    return tuple(column for column in (from_arrow(f.name, f.type) for f in table.schema) if column is not None)


def plan_for(tmp_path: Path, table: pa.Table, **kwargs: Any) -> WritePlan:
    store = FilesystemStore(str(tmp_path))
    for name in ("train", "val"):
        (tmp_path / name).mkdir(exist_ok=True)
    columns = tuple(column for column in columns_of(table) if column.name != kwargs.get("split"))
    arguments: dict[str, Any] = {"weight": None, "split": None, "fraction": 0.0, "seed": 0, **kwargs}
    return WritePlan(store, f"{tmp_path}/train", f"{tmp_path}/val", columns, **arguments)


def run(tmp_path: Path, table: pa.Table, batch: int = 10, partition: int = 0, **kwargs: Any) -> dict[str, Any]:
    plan = plan_for(tmp_path, table, **kwargs)
    return write_partition(plan, table.to_batches(batch), partition, f"part-{partition}")


def judge(tmp_path: Path, *reports: dict[str, Any], table: pa.Table, **kwargs: Any) -> list[Column]:
    plan = plan_for(tmp_path, table, **kwargs)
    request = Request(plan.columns, plan.weight, plan.split, plan.fraction, plan.seed)
    return _judge(list(reports), request, plan.store)


def files(tmp_path: Path) -> list[str]:
    return [name for _, _, names in os.walk(tmp_path) for name in names]


@pytest.mark.parametrize("rows", [1, 15, 16, 100, 5000, 40_000, 200_000])
def test_group_sizes(tmp_path: Path, rows: int) -> None:
    report = run(tmp_path, pa.table({"x": np.arange(rows)}), 1000)
    groups = [size for entry in report["train"] for size, _ in entry["groups"]]
    assert sum(groups) == rows
    assert max(groups) <= 4096
    assert max(groups) - min(groups) <= max(1, max(groups) // 2)
    assert len(groups) >= min(rows, 16)
    for entry in report["train"]:
        path = tmp_path / "train" / entry["name"]
        metadata = pq.ParquetFile(path).metadata
        found = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        assert found == [size for size, _ in entry["groups"]]
        assert len(found) <= writer.GROUPS_PER_FILE
        assert path.stat().st_size == entry["size"]
    whole = np.concatenate([pq.read_table(tmp_path / "train" / e["name"]).column("x") for e in report["train"]])
    np.testing.assert_array_equal(whole, np.arange(rows))


def test_wide_rows_make_groups_of_four_mebibytes(tmp_path: Path) -> None:
    width, rows = 4096, 2000
    values = pa.array(np.zeros(width * rows, np.float32))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values, width)})
    report = run(tmp_path, table, 50)
    groups = [size for entry in report["train"] for size, _ in entry["groups"]]
    assert sum(groups) == rows
    assert max(groups) * width * 4 <= 4 << 20


@pytest.mark.parametrize(
    ("columns", "kwargs", "message"),
    [
        ({"x": [1.0, None, 3.0]}, {}, "column 'x' has nulls in 1 of 3 rows"),
        ({"x": [1.0, NAN, NAN]}, {}, "column 'x' has NaN in 2 of 3 rows"),
        ({"x": [1, None, None]}, {}, "column 'x' has nulls in 2 of 3 rows"),
        ({"x": [True, None, False]}, {}, "column 'x' has nulls in 1 of 3 rows"),
        ({"v": [[1.0], None, [2.0]]}, {}, "column 'v' has nulls in 1 of 3 rows"),
        ({"v": [[1.0, NAN], [NAN, NAN], [2.0, 1.0]]}, {}, "column 'v' has NaN in 2 of 3 rows"),
        ({"v": [[1, None], [None, None], [2, 1]]}, {}, "column 'v' has nulls inside in 2 of 3 rows"),
        ({"v": [[1, 2], [1], [1, 2]]}, {}, r"'v' have 2 different sizes \(2 in 2 rows, 1 in 1 rows\)"),
        ({"v": [[], [], []]}, {}, "column 'v' are empty"),
        ({"x": [1, 2, 3], "w": [1.0, -1.0, 0.0]}, {"weight": "w"}, "column 'w' has negative values in 1 of 3"),
        ({"x": [1, 2, 3], "h": [True, True, True]}, {"split": "h"}, "all 3 rows are for validation"),
        ({"x": [1, 2, 3], "h": [False, False, False]}, {"split": "h"}, "column 'h' leaves 0 of 3 rows"),
        ({"x": [1, 2, 3], "h": [0, None, 1]}, {"split": "h"}, "column 'h' has nulls in 1 of 3"),
        ({"x": [1, 2, 3]}, {"fraction": 0.01}, "fraction 0.01 leaves 0 of 3 rows"),
        ({"x": [None, 2.0, NAN], "y": [None, 1, 2]}, {}, "'x' has NaN in 1 .* nulls in 1 .*'y' has nulls in 1"),
    ],
)
@pytest.mark.parametrize("batch", [1, 10])
def test_bad_data(tmp_path: Path, columns: dict[str, Any], kwargs: dict[str, Any], message: str, batch: int) -> None:
    types = {"v": pa.list_(pa.float64() if "NaN" in message or "1.0" in str(columns) else pa.int64())}
    table = pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()})
    report = run(tmp_path, table, batch, **kwargs)
    with pytest.raises(DataError, match=message):
        judge(tmp_path, report, table=table, **kwargs)
    if not kwargs.keys() & {"split", "fraction"}:
        assert files(tmp_path) == []


def test_infinities_give_one_warning_per_column(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table({"x": [1.0, INF, -INF], "v": [[INF, INF], [1.0, -INF], [0.0, 1.0]], "n": [1, 2, 3]})
    report = run(tmp_path, table, 1)
    judge(tmp_path, report, report, table=table)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"column {name!r} has infinite values in 4 of 6 rows" for name in ("v", "x")
    ]
    with pytest.raises(DataError, match="column 'x' has NaN in 1 of 2 rows"):
        judge(tmp_path, run(tmp_path, pa.table({"x": [NAN, INF]})), table=pa.table({"x": [NAN, INF]}))


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(pa.string(), 2, pa.array([b"A", b"\xffA"]).buffers())
    table = pa.table({"t": texts})
    plan = dataclasses.replace(plan_for(tmp_path, table), columns=(Column("t", "scalar", TEXT, (), '"string"'),))
    report = write_partition(plan, table.to_batches(), 0, "part-0")
    with pytest.raises(DataError, match="column 't' has text that is not valid UTF-8 in 1 of 2 rows: decode its bytes"):
        judge(tmp_path, report, table=table)


def test_widths_that_differ_between_partitions(tmp_path: Path) -> None:
    tables = [pa.table({"v": [[1, 2]] * 3}), pa.table({"v": [[1]] * 2})]
    reports = [run(tmp_path, table, partition=number) for number, table in enumerate(tables)]
    with pytest.raises(DataError, match="2 different sizes"):
        judge(tmp_path, *reports, table=tables[0])


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_vectors_in_sliced_batches(tmp_path: Path, kind: Any) -> None:
    values = [[float(i), float(-i)] for i in range(100)]
    table = pa.table({"v": pa.array(values, kind(pa.float32()))}).slice(30, 50)
    report = run(tmp_path, table, 7, fraction=0.3)
    found = []
    for part in ("train", "val"):
        for entry in report[part]:
            found += pq.read_table(tmp_path / part / entry["name"]).column("v").to_pylist()
    assert sorted(found) == values[30:80]
    assert sum(rows for entry in report["val"] for rows, _ in entry["groups"]) in (15, 16)


def test_fraction_is_held_over_many_small_partitions(tmp_path: Path) -> None:
    chosen = 0
    for partition in range(200):
        report = run(tmp_path, pa.table({"x": [1, 2, 3]}), partition=partition, fraction=0.1)
        chosen += sum(rows for entry in report["val"] for rows, _ in entry["groups"])
    assert abs(chosen - 60) <= 2


def test_rows_that_fail_leave_no_file(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(600_000)})

    def rows() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches(10_000)
        assert files(tmp_path)
        raise OSError("the input's own error")

    with pytest.raises(OSError, match="the input's own error"):
        write_partition(plan_for(tmp_path, table), rows(), 0, "part")
    assert files(tmp_path) == []


def test_a_store_that_executors_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"x": [1, 2, 3]})
    plan = plan_for(tmp_path, table)

    def refuse(fs: Any, path: str) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("sparkvod.data.files.open_to_write", refuse)
    report = write_partition(plan, table.to_batches(), 0, "part")
    with pytest.raises(StoreError, match="the executors cannot write.*PermissionError.* on .*Store.create"):
        judge(tmp_path, report, table=table)


def test_content_decides_the_digests(tmp_path: Path) -> None:
    digests = []
    for number, values in enumerate(([1, 2], [1, 2], [1, 3])):
        report = run(tmp_path, pa.table({"x": values}), partition=number)
        digests.append([entry["groups"] for entry in report["train"]])
    assert digests[0] == digests[1] != digests[2]
