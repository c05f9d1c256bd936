"""Columns to inputs and labels: which columns make which tensor, of which shape and dtype. NumPy, for all frameworks.

The rules, for features:

* no ``input_shapes``: all feature columns side by side, in their order, as one input ``[rows, numbers]``;
* one shape: the same, in that shape;
* as many shapes as feature columns: each column is an input of its own.

A shape's first dimension, -1, is the rows; it may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sparkvod.data.schema import TEXT
from sparkvod.errors import DataError


class ColumnLike(Protocol):
    """What is asked of a column of prepared data: ``shape`` is () for a scalar, (width,) for a vector."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype that holds what has the dtype ``name``: float32 for bfloat16, objects for ``string``.

    Raises:
        TypeError: there is no such dtype.
    """
    return np.dtype({"bfloat16": "float32", "string": TEXT}.get(name, name))


@dataclass(frozen=True)
class Input:
    """One input of the model.

    Attributes:
        columns: the columns that make it, side by side.
        tail: its shape without the rows.
        dtype: name of its dtype: one of NumPy's, bfloat16, or string.
    """

    columns: tuple[str, ...]
    tail: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.tail) * numpy_dtype(self.dtype).itemsize

    def array(self, columns: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """Returns the input of ``rows`` rows, shape ``[rows, *tail]``, contiguous, in :func:`numpy_dtype`."""
        if len(self.columns) == 1:
            array = columns[self.columns[0]].astype(numpy_dtype(self.dtype), copy=False)
            return np.ascontiguousarray(array).reshape(rows, *self.tail)
        parts = [part.reshape(rows, math.prod(part.shape[1:])) for part in (columns[name] for name in self.columns)]
        array = np.empty((rows, sum(part.shape[1] for part in parts)), numpy_dtype(self.dtype))
        at = 0
        for part in parts:
            array[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        return array.reshape(rows, *self.tail)


@dataclass(frozen=True)
class OutputSpec:
    """What is known of one output of the model.

    Attributes:
        tail: its shape without the rows.
        dtype: name of its dtype: one of NumPy's, or bfloat16.
    """

    tail: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Label:
    """One label.

    Attributes:
        column: its column.
        tail: its shape without the rows; None: as the column is, or as the output is if that has as many numbers.
        dtype: name of its dtype: one of NumPy's, or bfloat16.
        is_mean: whether its loss makes one number of the batch, the mean over the rows, though asked for one per row.
    """

    column: str
    tail: tuple[int, ...] | None
    dtype: str
    is_mean: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a row, as far as the shape is known."""
        return math.prod(self.tail or ()) * numpy_dtype(self.dtype).itemsize

    def array(self, columns: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """Returns the label of ``rows`` rows, contiguous, in :func:`numpy_dtype`.

        Raises:
            DataError: fractions would be cut off.
        """
        found = columns[self.column]
        array = np.ascontiguousarray(found.astype(numpy_dtype(self.dtype), copy=False))
        if array.dtype.kind == "i" and found.dtype.kind == "f" and not np.array_equal(array, found):
            raise DataError(
                f"label {self.column!r} has fractional values, such as {found[array != found].flat[0]:g}, the loss "
                "needs whole class numbers; number the classes from 0, or take a loss for numbers (the squared error)"
            )
        return array if self.tail is None else array.reshape(rows, *self.tail)


def _tail(shape: Sequence[int], width: int, what: str) -> tuple[int, ...]:
    tail = tuple(int(n) for n in (shape[1:] if shape and shape[0] == -1 else shape))
    if -1 in tail or math.prod(tail) != width:
        raise DataError(
            f"shape {list(shape)} was found for {what}, which has {width} number{'s' * (width != 1)} per row; "
            "-1, for the rows, and then dimensions whose product is that were expected"
        )
    return tail


def plan_inputs(
    columns: Sequence[ColumnLike],
    shapes: Sequence[Sequence[int] | None] | None,
    dtypes: Sequence[str | None] | None,
    default_dtype: str,
) -> tuple[Input, ...]:
    """Returns the model's inputs.

    Args:
        columns: the feature columns in order.
        shapes: the Param ``input_shapes``.
        dtypes: the Param ``input_dtypes``, one per input.
        default_dtype: dtype of inputs that have none there.

    Raises:
        DataError: the shapes do not fit the columns.
    """
    widths = [math.prod(column.shape) for column in columns]
    names = [column.name for column in columns]
    if shapes is not None and len(shapes) not in (1, len(columns)):
        raise DataError(
            f"input_shapes with {len(shapes)} shapes was found, one per feature column ({len(columns)}: "
            f"{', '.join(names)}) "
            "or a single one for all of them side by side was expected"
        )
    if shapes is None or (len(shapes) == 1 and len(columns) > 1):
        given = None if shapes is None else shapes[0]
        what = f"the columns {', '.join(names)} side by side" if len(names) > 1 else f"column {names[0]!r}"
        tail = (sum(widths),) if given is None else _tail(given, sum(widths), what)
        groups = [(tuple(names), tail)]
    else:
        groups = [
            ((name,), column.shape or (1,) if shape is None else _tail(shape, width, f"column {name!r}"))
            for name, column, shape, width in zip(names, columns, shapes, widths, strict=True)
        ]
    if dtypes is not None and len(dtypes) != len(groups):
        raise DataError(f"input_dtypes with {len(dtypes)} dtypes was found, one per input ({len(groups)}) was expected")
    chosen = [dtype or default_dtype for dtype in (dtypes or [None] * len(groups))]
    return tuple(Input(columns_, tail, dtype) for (columns_, tail), dtype in zip(groups, chosen, strict=True))


def label_tails(
    columns: Sequence[ColumnLike], shapes: Sequence[Sequence[int] | None] | None
) -> list[tuple[int, ...] | None]:
    """Returns the labels' shapes without the rows, from the Param ``label_shapes``; None where none is given.

    Raises:
        DataError: the shapes do not fit the columns.
    """
    if shapes is None:
        return [None] * len(columns)
    if len(shapes) != len(columns):
        raise DataError(
            f"label_shapes with {len(shapes)} shapes was found, one per label ({len(columns)}) was expected"
        )
    return [
        None if shape is None else _tail(shape, math.prod(column.shape), f"label {column.name!r}")
        for column, shape in zip(columns, shapes, strict=True)
    ]


def weights(columns: Mapping[str, np.ndarray], name: str | None) -> np.ndarray | None:
    """Returns the sample weights as float64 of shape ``[rows]``, or None where there is no such column.

    Raises:
        DataError: one is negative. (Data that we prepared have none; files written by others may.)
    """
    if name is None:
        return None
    found = columns[name].astype(np.float64, copy=False).reshape(-1)
    if found.size and found.min() < 0:
        raise DataError(f"a sample weight of {found.min():g} was found in column {name!r}, 0 or more was expected")
    return found


def as_dict(columns: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns columns as plain values, for a model's metadata."""
    return {c.name: {"dtype": c.dtype, "shape": list(c.shape), "spark_type": c.spark_type} for c in columns}


def require_spark(dataset: Any, method: str) -> None:
    """Refuses what is no Spark DataFrame.

    Raises:
        TypeError: it is something else.
    """
    if hasattr(dataset, "sparkSession") and hasattr(dataset, "mapInArrow"):
        return
    if type(dataset).__module__.startswith("pyspark.pandas"):
        raise TypeError(f"{method} needs a Spark DataFrame, got one of pandas on Spark: call .to_spark() on it")
    kind = f"{type(dataset).__module__.partition('.')[0]} {type(dataset).__name__}"
    raise TypeError(
        f"{method} was called with a {kind}, a Spark DataFrame was expected; make one with spark.createDataFrame(...)"
    )
