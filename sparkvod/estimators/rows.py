"""Rows of the training data as the model gets them, apart from the training loop. For drivers and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkvod.data import Batch, open_reader
from sparkvod.errors import DataError

if TYPE_CHECKING:
    from sparkvod.data import Dataset


def transformed(function: Callable[[Any], Any] | None, batch: Batch) -> Batch:
    """Returns the batch that a ``transformation_fn`` makes of one.

    Raises:
        DataError: it made another number of rows.
    """
    if function is None:
        return batch
    import pandas

    frame = pandas.DataFrame({name: list(a) if a.ndim > 1 else a for name, a in batch.columns.items()})
    frame = function(frame)
    if len(frame) != batch.rows:
        raise DataError(f"transformation_fn must keep the number of rows: it got {batch.rows}, returned {len(frame)}")
    columns = {
        name: np.stack(frame[name].tolist()) if batch.rows and frame[name].dtype == object else frame[name].to_numpy()
        for name in frame.columns
    }
    return Batch(columns, batch.rows, batch.global_rows)


def first(
    reader: str, dataset: Dataset, columns: Sequence[str], rows: int, function: Callable[[Any], Any] | None
) -> dict[str, np.ndarray]:
    """Returns the first rows of a data set in its own order, at most ``rows`` of them.

    Args:
        reader: name of the reader.
        dataset: what to read.
        columns: names of the columns.
        rows: how many.
        function: the ``transformation_fn``, if there is one.
    """
    opened = open_reader(reader, dataset, columns, rows, shuffle=False)
    with closing(opened):
        batches: Any = opened.epoch(0)
        with closing(batches):
            found = transformed(function, next(batches)).columns
    return {name: array.copy() for name, array in found.items()}
