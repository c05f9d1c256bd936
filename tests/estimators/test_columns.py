"""Columns to inputs and labels."""

import numpy as np
import pytest

from sparkvod.data import Column
from sparkvod.errors import DataError
from sparkvod.estimators import columns


def column(name, width=None, dtype="float64"):
    return Column(name, "scalar" if width is None else "vector", dtype, () if width is None else (width,), '"double"')


S, T, V = column("s"), column("t", dtype="int32"), column("v", 6)


@pytest.mark.parametrize(
    ("given", "shapes", "tails"),
    [
        ([S], None, [(1,)]),
        ([V], None, [(6,)]),
        ([S, T, V], None, [(8,)]),
        ([V], [[-1, 6]], [(6,)]),
        ([V], [[2, 3]], [(2, 3)]),
        ([V], [[-1, 1, 2, 3]], [(1, 2, 3)]),
        ([V], [None], [(6,)]),
        ([S], [[-1]], [()]),
        ([S, T], [[-1, 2]], [(2,)]),
        ([S, V], [[-1, 1], [3, 2]], [(1,), (3, 2)]),
        ([S, V], [None, None], [(1,), (6,)]),
    ],
)
def test_shapes(given, shapes, tails):
    assert [item.tail for item in columns.plan_inputs(given, shapes, None, "float32")] == tails


@pytest.mark.parametrize(
    ("given", "shapes", "words"),
    [
        ([V], [[-1, 5]], r"shape \[-1, 5\] was found for column 'v', which has 6 numbers per row"),
        ([V], [[6, -1]], "-1, for the rows"),
        ([S, T, V], [[-1, 1], [-1, 1]], r"one per feature column \(3: s, t, v\)"),
        ([S, T], [[-1, 3]], "the columns s, t side by side"),
    ],
)
def test_shapes_that_do_not_fit(given, shapes, words):
    with pytest.raises(DataError, match=words):
        columns.plan_inputs(given, shapes, None, "float32")


def test_dtypes():
    inputs = columns.plan_inputs([S, T], [None, None], [None, "int64"], "float32")
    assert [item.dtype for item in inputs] == ["float32", "int64"]
    with pytest.raises(DataError, match="one per input"):
        columns.plan_inputs([S, T], None, [None, "int64"], "float32")


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_arrays(rows):
    data = {
        "s": np.arange(rows) + 0.5,
        "t": np.arange(rows, dtype="int32"),
        "v": np.arange(rows * 6.0).reshape(rows, 6),
    }
    (side_by_side,) = columns.plan_inputs([S, T, V], None, None, "float32")
    found = side_by_side.array(data, rows)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.column_stack([data["s"], data["t"], data["v"]]).astype("float32"))
    (shaped,) = columns.plan_inputs([V], [[2, 3]], None, "float64")
    assert shaped.array(data, rows).shape == (rows, 2, 3)
    (flat,) = columns.plan_inputs([S], [[-1]], None, "float64")
    assert flat.array(data, rows).shape == (rows,)
    assert columns.Label("t", None, "int64").array(data, rows).dtype == np.int64
    assert columns.Label("v", (3, 2), "float32").array(data, rows).shape == (rows, 3, 2)


def test_label_shapes():
    assert columns.label_tails([S, V], None) == [None, None]
    assert columns.label_tails([S, V], [[-1, 1], [-1, 3, 2]]) == [(1,), (3, 2)]
    with pytest.raises(DataError, match="one per label"):
        columns.label_tails([S, V], [[-1, 1]])
    with pytest.raises(DataError, match="label 'v'"):
        columns.label_tails([V], [[-1, 1]])
