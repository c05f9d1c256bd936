"""Runs a model once on the driver, on a few rows of zeros, to see that data, model, loss and labels fit together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from sparkvod.errors import DataError
from sparkvod.estimators.columns import ColumnLike, Input, Label, numpy_dtype
from sparkvod.estimators.keras.losses import LossTerm, term_for
from sparkvod.estimators.keras.model_io import Feed, labels

#: Prime, so that it is no dimension of anybody's data by chance.
ROWS = 3


def forward(feed: Feed) -> list[Any]:
    """Returns the model's outputs for rows of zeros, in the labels' order, and builds a model that was not built.

    Raises:
        DataError: it cannot take the inputs, or returns something else than one output per label.
    """
    arrays = zeros(feed.inputs)
    shapes = ", ".join(
        f"[rows, {', '.join(map(str, i.tail))}] {i.dtype}" if i.tail else f"[rows] {i.dtype}" for i in feed.inputs
    )
    try:
        outputs = feed.call([keras.ops.convert_to_tensor(array) for array in arrays], training=False)
    except TypeError as error:
        if "was found" in str(error):
            raise
        raise _cannot(feed, shapes, error) from error
    except Exception as error:
        raise _cannot(feed, shapes, error) from error
    for output in outputs:
        if len(output.shape) == 0 or output.shape[0] != ROWS:
            raise DataError(
                f"a model that makes an output of shape {list(output.shape)} from {ROWS} rows was found, one with "
                f"{ROWS} as its first dimension was expected; do not reduce over the rows"
            )
    return outputs


def _cannot(feed: Feed, shapes: str, error: Exception) -> DataError:
    count = len(feed.inputs)
    return DataError(
        f"the model cannot take its {count} input{'s' * (count > 1)} of {shapes} ({type(error).__name__}: {error}); "
        "change feature_cols, input_shapes (one shape per feature column, or one for all of them side by side), or "
        "the model"
    )


def zeros(inputs: Sequence[Input]) -> list[np.ndarray]:
    """Returns inputs of zeros."""
    return [
        np.full((ROWS, *item.tail), "" if item.dtype == "string" else 0, numpy_dtype(item.dtype)) for item in inputs
    ]


def plan_labels(
    outputs: Sequence[Any],
    columns: Sequence[ColumnLike],
    losses: Sequence[Any],
    tails: Sequence[tuple[int, ...] | None],
    weighted: bool,
    own_loss: bool,
) -> tuple[list[LossTerm], tuple[Label, ...]]:
    """Returns the losses, and how label columns make labels.

    Args:
        outputs: the model's outputs in the labels' order, for rows of zeros.
        columns: the label columns.
        losses: what Keras takes as a loss, one per label.
        tails: the labels' shapes without the rows, None where none was given.
        weighted: whether there are sample weights.
        own_loss: whether the model computes the loss itself.

    Raises:
        DataError: outputs fit neither labels nor losses.
    """
    if len(outputs) != len(columns):
        names = ", ".join(column.name for column in columns)
        raise DataError(
            f"a model with {len(outputs)} outputs was found, one per label ({len(columns)}: {names}) was expected; "
            "change label_cols, or the model's outputs"
        )
    terms, planned = [], []
    for column, output, loss, tail in zip(columns, outputs, losses, tails, strict=True):
        shape = column.shape if tail is None else tail
        term = LossTerm(None, "compute_loss") if own_loss else term_for(loss, column.name, shape, output.shape[1:])
        terms.append(term)
        planned.append(_label(column, term, output, tail, weighted, own_loss))
    return terms, tuple(planned)


def _label(
    column: ColumnLike, term: LossTerm, output: Any, tail: tuple[int, ...] | None, weighted: bool, own_loss: bool
) -> Label:
    width = math.prod(column.shape)
    shape = column.shape if tail is None else tail
    made = tuple(int(n) for n in output.shape[1:])
    if term.takes_classes:
        classes = made[-1] if made else 0
        if classes < 2 or width * classes != math.prod(made):
            raise _unfit(
                column,
                made,
                shape,
                term,
                "one output per class, two at least, was expected (for two classes and one output per row, "
                "binary_crossentropy is the loss)",
            )
        if tail is None:
            tail = made[:-1]
    elif width == math.prod(made) and tail is None:
        tail = made
    elif term.is_known and math.prod(shape) != math.prod(made):
        raise _unfit(column, made, shape, term, "as many numbers in both were expected")
    label = Label(column.name, tail, _dtype(column, term))
    if not own_loss:
        _try(term, label, output, column, weighted)
    return label


def _dtype(column: ColumnLike, term: LossTerm) -> str:
    """Returns a label's dtype: whole numbers stay whole, as in Keras; class numbers always are."""
    if term.takes_classes:
        return "int64"
    return column.dtype if np.dtype(column.dtype).kind in "iu" else keras.backend.floatx()


def _try(term: LossTerm, label: Label, output: Any, column: ColumnLike, weighted: bool) -> None:
    nothing = np.zeros((ROWS, *column.shape), column.dtype)
    found = labels([label], {column.name: nothing}, ROWS)[0]
    made = tuple(int(n) for n in output.shape[1:])
    try:
        value = term.values(keras.ops.convert_to_tensor(found), output)
        shape = tuple(value.shape)
    except Exception as error:
        raise _unfit(
            column, made, found.shape[1:], term, f"the loss failed on them ({type(error).__name__}: {error})"
        ) from error
    if shape and shape[0] != ROWS:
        raise _unfit(
            column,
            made,
            found.shape[1:],
            term,
            f"it returned the shape {list(shape)}, one number, or one per row, was expected",
        )
    if weighted and not shape:
        raise DataError(
            f"a loss ({term.name}) that returns one number per batch was found together with sample_weight_col, one "
            "that returns a number per row was expected; do not take the mean over the rows in it"
        )


def _unfit(column: ColumnLike, made: Sequence[int], shape: Sequence[int], term: LossTerm, expected: str) -> DataError:
    output = ", ".join(["rows", *map(str, made)])
    has = ", ".join(["rows", *map(str, shape)])
    return DataError(
        f"the model's output for label {column.name!r} has the shape [{output}], the label [{has}] ({column.dtype}), "
        f"and the loss is {term.name}: {expected}; change the model's last layer, label_shapes, or the loss"
    )
