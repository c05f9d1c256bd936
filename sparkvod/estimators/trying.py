"""What trying a model on the driver has in common in all frameworks: the rows, and what is said when it fails.

They are rows of zeros, before anything is prepared. A model that fails on these, because its ids begin at 1 or because
it takes a logarithm, is tried again on the first rows of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar

import numpy as np

from sparkvod.errors import DataError
from sparkvod.estimators.columns import ColumnLike, Input, numpy_dtype

T = TypeVar("T")

#: The rows of the data that a second attempt is made with.
_real: ContextVar[Mapping[str, np.ndarray] | None] = ContextVar("real", default=None)

#: Prime, so that it is no dimension of anybody's data by chance.
ROWS = 3


def row_counts(*shapes: Sequence[int]) -> list[int]:
    """Returns two numbers of rows for losses and metrics to be tried with.

    None of them is a dimension of what they are given, with which it would broadcast: a label ``[3]`` fits an output
    ``[3, 3]``, and so the mistake shows only where the rows are as many as the outputs.

    Args:
        shapes: of outputs and labels, without the rows.
    """
    taken = {int(n) for shape in shapes for n in shape}
    return list(islice((number for number in _primes() if number not in taken), 2))


def _primes() -> Iterator[int]:
    """Yields primes from ROWS on: numbers that no shape is divided by, so that rows are not taken for anything else."""
    number = ROWS
    while True:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            yield number
        number += 1


class CannotTakeRows(DataError):
    """The model or a loss raised on the rows that it was tried on: it may take others."""


def tried(attempt: Callable[[], T], real_rows: Callable[[], Mapping[str, np.ndarray]]) -> T:
    """Returns what ``attempt`` makes with rows of zeros, or, when model or loss fail on them, with real ones.

    Args:
        attempt: tries the model with what :func:`zeros` and :func:`nothing` return.
        real_rows: returns columns by name, of one row or more.

    Raises:
        DataError: it fails on real rows too; the error is that of those.
    """
    try:
        return attempt()
    except CannotTakeRows:
        token = _real.set(real_rows())
    try:
        return attempt()
    finally:
        _real.reset(token)


def _over_and_over(array: np.ndarray, rows: int) -> np.ndarray:
    return array[np.arange(rows) % len(array)]


def zeros(inputs: Sequence[Input], rows: int = ROWS) -> list[np.ndarray]:
    """Returns inputs of zeros, or of empty text, ``[rows, *tail]``; real ones in a second :func:`tried`."""
    real = _real.get()
    if real is not None:
        columns = {name: _over_and_over(array, rows) for name, array in real.items()}
        return [item.array(columns, rows).copy() for item in inputs]
    return [
        np.full((rows, *item.tail), "" if item.dtype == "string" else 0, numpy_dtype(item.dtype)) for item in inputs
    ]


def nothing(column: ColumnLike, rows: int = ROWS) -> np.ndarray:
    """Returns zeros, or what is real as :func:`zeros` has it, for a label's column, as the data would have it."""
    real = _real.get()
    if real is not None:
        return _over_and_over(real[column.name], rows)
    return np.zeros((rows, *column.shape), column.dtype)


def cannot_take(inputs: Sequence[Input], error: Exception) -> CannotTakeRows:
    """Returns what to raise where the model failed on its inputs."""
    shapes = ", ".join(f"{_shown(item.tail)} {item.dtype}" for item in inputs)
    return CannotTakeRows(
        f"the model cannot take its {len(inputs)} input{'s' * (len(inputs) > 1)} of {shapes} "
        f"({type(error).__name__}: {error}); change feature_cols, input_shapes (one shape per feature column, or one "
        "for all of them side by side), input_dtypes, or the model"
    )


def require_rows(shape: Sequence[int], whose: str = "") -> None:
    """Checks the shape of an output.

    Args:
        shape: of the output for ROWS rows.
        whose: `` for label ...``, where that is known.

    Raises:
        DataError: its first dimension is not the rows.
    """
    if len(shape) == 0 or shape[0] != ROWS:
        raise DataError(
            f"a model that makes an output of shape {list(shape)} from {ROWS} rows was found{whose}, one with {ROWS} "
            "as its first dimension was expected; do not reduce over the rows"
        )


def require_one_per_label(outputs: int, columns: Sequence[ColumnLike], change: str) -> None:
    """Checks the number of outputs.

    Args:
        outputs: that.
        columns: the labels' columns.
        change: what may be changed, besides ``label_cols``.

    Raises:
        DataError: there are more or fewer than labels.
    """
    if outputs != len(columns):
        names = ", ".join(column.name for column in columns)
        raise DataError(
            f"a model with {outputs} outputs was found, one per label ({len(columns)}: {names}) was expected; "
            f"change label_cols, or {change}"
        )


def unfit(column: ColumnLike, made: Sequence[int], shape: Sequence[int], loss: str, expected: str) -> DataError:
    """Returns what to raise where output, label and loss do not fit together.

    Args:
        column: the label's column.
        made: the output's shape without the rows.
        shape: the label's shape without the rows.
        loss: the loss's name.
        expected: what was.
    """
    return DataError(
        f"the model's output for label {column.name!r} has the shape {_shown(made)}, the label {_shown(shape)} "
        f"({column.dtype}), and the loss is {loss}: {expected}; change the model's last layer, label_shapes, or the "
        "loss"
    )


def _shown(tail: Sequence[int]) -> str:
    return f"[{', '.join(['rows', *map(str, tail)])}]"
