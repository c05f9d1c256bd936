"""Prediction inside Spark's Python workers: Arrow batches in, Arrow batches out, one model per worker."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkvod.data.schema import require_utf8
from sparkvod.errors import DataError
from sparkvod.estimators.columns import Input

Predict = Callable[[Mapping[str, np.ndarray], int], Sequence[np.ndarray]]

_KEPT = 4
_loaded: OrderedDict[str, Predict] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class Output:
    """One output: its column, and the values in it.

    Attributes:
        name: name of the column.
        tail: shape of the model's output without the rows.
        dtype: NumPy dtype of the column's numbers, float32 or float64.
        is_vector: whether the column holds ML vectors, which travel as lists.
    """

    name: str
    tail: tuple[int, ...]
    dtype: str
    is_vector: bool

    @property
    def width(self) -> int:
        """Numbers per row."""
        return math.prod(self.tail)

    def to_arrow(self, values: np.ndarray, rows: int) -> pa.Array:
        """Returns the model's output as a column."""
        if values.size != rows * self.width:
            raise DataError(
                f"the model returned {list(values.shape)} for {rows} rows, [{rows}, {self.width}] was expected, "
                "as in training"
            )
        flat = self._numbers(values.reshape(-1))
        if not self.is_vector:
            return flat
        offsets = pa.array(np.arange(0, rows * self.width + 1, self.width, dtype=np.int32))
        return pa.ListArray.from_arrays(offsets, flat)

    def _numbers(self, values: np.ndarray) -> pa.Array:
        """Returns numbers in this column's type."""
        made = np.ascontiguousarray(values, dtype=self.dtype)
        if values.dtype.kind in "iu" and not np.array_equal(made.astype(values.dtype), values):
            wrong = values[made.astype(values.dtype) != values].flat[0]
            raise DataError(
                f"output column {self.name!r} cannot hold the whole number {wrong} exactly (its type is "
                f"{self.dtype}): return numbers up to 2**53, or split them into two outputs"
            )
        return pa.array(made)


@dataclass(frozen=True)
class Predictor(ABC):
    """A model as it travels to Spark's Python workers.

    Attributes:
        key: what tells it from others: a hash of its content and of its inputs.
        content: the model's bytes; empty when they travel as the file ``key``.
        inputs: how columns make the model's inputs.
        outputs: the columns that are made.
        widths: numbers per row of each feature column; 0 for a scalar.
    """

    key: str
    content: bytes
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    widths: dict[str, int]

    @abstractmethod
    def load(self, content: bytes) -> Predict:
        """Returns the function from columns and their number of rows to the model's outputs."""

    def loaded(self) -> Predict:
        """Returns :meth:`load`'s function; a process keeps the last few models."""
        with _lock:
            if self.key not in _loaded:
                _loaded[self.key] = self.load(self.content or self._shipped())
                while len(_loaded) > _KEPT:
                    _loaded.popitem(last=False)
            _loaded.move_to_end(self.key)
            return _loaded[self.key]

    def _shipped(self) -> bytes:
        from pyspark import SparkFiles

        with open(SparkFiles.get(self.key), "rb") as file:
            return file.read()

    def predict(self, batch: Sequence[pa.Array]) -> list[pa.Array]:
        """Returns the output columns of a batch of the feature columns, in the order of ``widths``."""
        rows = len(batch[0])
        columns = {
            name: to_numpy(array, name, width) for (name, width), array in zip(self.widths.items(), batch, strict=True)
        }
        if rows == 0:
            return [output.to_arrow(np.empty((0, output.width)), 0) for output in self.outputs]
        results = self.loaded()(columns, rows)
        if len(results) != len(self.outputs):
            raise DataError(
                f"the model returned {len(results)} outputs, {len(self.outputs)} were expected, as in training"
            )
        return [output.to_arrow(np.asarray(r), rows) for output, r in zip(self.outputs, results, strict=True)]

    def predict_all(self, batches: Iterator[Any]) -> Iterator[pa.Array]:
        """Yields the output columns of each batch, as one struct column."""
        names = [f"o{i}" for i in range(len(self.outputs))]
        for batch in batches:
            yield pa.StructArray.from_arrays(self.predict(batch if isinstance(batch, tuple) else (batch,)), names)


def to_numpy(array: pa.Array, name: str, width: int) -> np.ndarray:
    """Returns a feature column as an array of shape ``[rows]``, or ``[rows, width]`` if ``width`` is not 0.

    Raises:
        DataError: it has nulls, or lists of another length.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if width == 0:
        flat = array
    else:
        lengths = pc.unique(pc.list_value_length(array).drop_null()).to_pylist()
        if any(length != width for length in lengths):
            raise DataError(
                f"feature column {name!r} with lists of length {lengths} was found, length {width} was "
                "expected, as in training"
            )
        flat = array.flatten()
    nulls = array.null_count or flat.null_count
    if nulls:
        is_text = pa.types.is_string(flat.type) or pa.types.is_large_string(flat.type)
        fill = f'df.fillna("", [{name!r}])' if is_text else "pyspark.ml.feature.Imputer"
        raise DataError(
            f"feature column {name!r} has {nulls} nulls among {len(array)} rows: drop these rows, or fill them, for "
            f"example with {fill}"
        )
    try:
        values = flat.to_numpy(zero_copy_only=False)
    except (UnicodeDecodeError, pa.ArrowException):
        require_utf8(name, flat)
        raise
    return values.reshape(-1, width) if width else values
