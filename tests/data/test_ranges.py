"""What is noted of a column's values: of arrays, of footers, and of several parts together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkvod.data import Store, open_prepared, prepare
from sparkvod.data.ranges import Range, merged, of_statistics, of_values


@pytest.mark.parametrize(
    ("values", "ends", "whole"),
    [
        (np.array([3, -100, 0, 2, 1, 0]), (-100, 0, 2, 3), True),
        (np.array([2.0, 2.0]), (2.0,), True),
        (np.array([[0.5, 1.0], [2.0, 1.5]]), (0.5, 1.0, 1.5, 2.0), False),
        (np.array([True, False]), (0, 1), True),
        (np.array([], "float32"), (), True),
        (np.array([0.0, math.inf]), (0.0, math.inf), True),
        (np.array([2**60 + 1, 2**60]), (2**60, 2**60 + 1), True),
    ],
)
def test_of_values(values: np.ndarray, ends: tuple[float, ...], whole: bool) -> None:
    found = of_values(values)
    assert found == Range(ends, whole)
    assert Range.from_json(found.to_json()) == found


def test_parts_together_are_what_the_whole_is() -> None:
    values = np.random.default_rng(0).integers(-50, 50, 300)
    parts = [{"k": of_values(part)} for part in (values[:1], values[1:7], values[7:7], values[7:])]
    assert merged(*parts) == {"k": of_values(values)}
    assert merged({"k": Range((1,), None)}, {"k": Range((0,), True)}) == {"k": Range((0, 1), None)}
    assert merged({"k": Range((1,), None)}, {"k": Range((0.5,), False)})["k"].whole is False


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 2, Range((0, 2), True)),
        (False, True, Range((0, 1), True)),
        (0.0, 2.0, Range((0.0, 2.0), None)),
        (0.9, 2.0, Range((0.9, 2.0), False)),
        (b"a", b"z", None),
        (math.nan, math.nan, None),
    ],
)
def test_of_footers(low: Any, high: Any, expected: Range | None) -> None:
    assert of_statistics(low, high) == expected


def test_the_labels_of_prepared_data_have_ranges(spark: Any, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    df = spark.range(0, 30, 1, 3).selectExpr("id as x", "double(id % 4) as k", "array(id / 2, -1D) as v")
    prepared = prepare(df, store, label_cols=["k", "v"], validation=0.2, verbose=0)
    assert prepared.ranges == {"k": Range((0, 1, 2, 3), True), "v": Range((-1, 0, 14, 14.5), False)}
    assert open_prepared(store, prepared.idx).ranges == prepared.ranges
    weighted = prepare(df, store, label_cols=["v"], sample_weight_col="k", verbose=0)
    assert weighted.ranges["k"] == Range((0, 1, 2, 3), True)


def test_others_files_have_those_of_their_footers(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    table = pa.table({"a.b": [3, 1, 2], "f": [0.5, 1.0, 2.0], "v": [[1.0], [2.0], [3.0]]})
    for path, statistics in ((store.get_train_data_path(), True), (store.get_val_data_path(), False)):
        Path(path).mkdir(parents=True)
        pq.write_table(table, f"{path}/part-0.parquet", row_group_size=2, write_statistics=statistics)
    prepared = open_prepared(store)
    assert prepared.ranges == {"a.b": Range((1, 2, 3), True), "f": Range((0.5, 1.0, 2.0), False)}
    assert prepared.val is not None
    assert prepared.val.ranges == {}
