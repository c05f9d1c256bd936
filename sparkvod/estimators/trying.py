"""What trying a model on rows of zeros has in common in all frameworks: the rows, and what is said when it fails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkvod.errors import DataError
from sparkvod.estimators.columns import ColumnLike, Input, numpy_dtype

#: Prime, so that it is no dimension of anybody's data by chance.
ROWS = 3


def zeros(inputs: Sequence[Input]) -> list[np.ndarray]:
    """Returns inputs of zeros, or of empty text, ``[ROWS, *tail]``."""
    return [
        np.full((ROWS, *item.tail), "" if item.dtype == "string" else 0, numpy_dtype(item.dtype)) for item in inputs
    ]


def nothing(column: ColumnLike) -> np.ndarray:
    """Returns zeros for a label's column, as the data would have it."""
    return np.zeros((ROWS, *column.shape), column.dtype)


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
