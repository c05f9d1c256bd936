"""What trying a model on rows of zeros has in common in all frameworks: the rows, and what is said when it fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from sparkvod.errors import DataError
from sparkvod.estimators.columns import ColumnLike, Input, numpy_dtype

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


def zeros(inputs: Sequence[Input], rows: int = ROWS) -> list[np.ndarray]:
    """Returns inputs of zeros, or of empty text, ``[rows, *tail]``."""
    return [
        np.full((rows, *item.tail), "" if item.dtype == "string" else 0, numpy_dtype(item.dtype)) for item in inputs
    ]


def nothing(column: ColumnLike, rows: int = ROWS) -> np.ndarray:
    """Returns zeros for a label's column, as the data would have it."""
    return np.zeros((rows, *column.shape), column.dtype)


def cannot_take(inputs: Sequence[Input], error: Exception) -> DataError:
    """Returns what to raise where the model failed on its inputs."""
    shapes = ", ".join(f"{_shown(item.tail)} {item.dtype}" for item in inputs)
    return DataError(
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
