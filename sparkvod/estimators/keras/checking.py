"""Runs a model once on the driver, on a few rows of zeros, to see that data, model, loss and labels fit together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from sparkvod.errors import DataError
from sparkvod.estimators import trying
from sparkvod.estimators.columns import ColumnLike, Label
from sparkvod.estimators.keras.loop import Loop
from sparkvod.estimators.keras.losses import LossTerm, term_for
from sparkvod.estimators.keras.model_io import Feed, labels
from sparkvod.estimators.trying import ROWS


def forward(feed: Feed) -> list[Any]:
    """Returns the model's outputs for rows of zeros, in the labels' order, and builds a model that was not built.

    Raises:
        DataError: it cannot take the inputs, reduces over the rows, or has lost what its functions refer to.
        TypeError: it returns something else than tensors.
    """
    arrays = trying.zeros(feed.inputs)
    try:
        result = feed.run([keras.ops.convert_to_tensor(array) for array in arrays], training=False)
    except NameError as error:
        found = re.search(r"name '.+' is not defined", str(error))  # within Keras's own lines
        raise DataError(
            f"the model's copy, made from its .keras file, has a function that fails ({found[0] if found else error}): "
            "a Lambda is saved as its code, without the imports and variables around it; import within it, or "
            "write a Layer with a call() and a get_config()"
        ) from error
    except Exception as error:
        raise trying.cannot_take(feed.inputs, error) from error
    outputs = feed.outputs(result)
    for output in outputs:
        trying.require_rows(output.shape)
    return outputs


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
    trying.require_one_per_label(len(outputs), columns, "the model's outputs")
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
            raise trying.unfit(
                column,
                made,
                shape,
                term.name,
                "one output per class, two at least, was expected (for two classes and one output per row, "
                "binary_crossentropy is the loss)",
            )
        if tail is None:
            tail = made[:-1]
    elif term.among is not None and _along(term.among, made) < 2:
        raise trying.unfit(
            column,
            made,
            shape,
            term.name,
            "two outputs at least were expected, since of a single one this loss says the same whatever it is (for two "
            "classes and one output per row, binary_crossentropy is the loss)",
        )
    elif width == math.prod(made) and tail is None:
        tail = made
    elif term.is_known and math.prod(shape) != math.prod(made):
        raise trying.unfit(column, made, shape, term.name, "as many numbers in both were expected")
    label = Label(column.name, tail, _dtype(column, term))
    if not own_loss:
        _try(term, label, output, column, weighted)
    return label


def try_own_loss(loop: Loop, inputs: list[Any], labels_: list[Any], outputs: list[Any], weights: Any) -> None:
    """Tries a loss that the model computes itself.

    Raises:
        DataError: it fails, or is not one number.
    """
    problem, cause = None, None
    try:
        found = tuple(loop.losses(inputs, labels_, outputs, weights, training=True)[0][0].shape)
        if found:
            problem = f"returned the shape {list(found)}"
    except Exception as error:
        problem, cause = f"failed ({type(error).__name__}: {error})", error
    loop.reset_metrics()
    if problem is not None:
        shown = "; ".join(f"{list(y.shape)} and {list(p.shape)}" for y, p in zip(labels_, outputs, strict=True))
        raise DataError(
            f"compute_loss() of {type(loop.model).__name__} {problem} for labels and outputs of the shapes {shown}: "
            "one number, the mean over these rows, was expected; change it, label_shapes, or the model's last layer"
        ) from cause


def _along(axis: int, made: tuple[int, ...]) -> int:
    """Returns the outputs along an axis, counted with the rows; of one number per row it is one."""
    shape = (2, *made) if made else (2, 1)  # rows are no outputs, and of no concern
    return shape[axis] if -len(shape) <= axis < len(shape) else 2


def _dtype(column: ColumnLike, term: LossTerm) -> str:
    """Returns a label's dtype: whole numbers stay whole, as in Keras; class numbers always are."""
    if term.takes_classes:
        return "int64"
    return column.dtype if np.dtype(column.dtype).kind in "iu" else keras.backend.floatx()


def _try(term: LossTerm, label: Label, output: Any, column: ColumnLike, weighted: bool) -> None:
    made = tuple(int(n) for n in output.shape[1:])
    for rows in trying.row_counts(made, column.shape, label.tail or ()):
        found = labels([label], {column.name: trying.nothing(column, rows)}, rows)[0]
        try:
            value = term.values(keras.ops.convert_to_tensor(found), _of_rows(output, rows))
            shape = tuple(value.shape)
        except Exception as error:
            raise trying.unfit(
                column, made, found.shape[1:], term.name, f"the loss failed on them ({type(error).__name__}: {error})"
            ) from error
        if shape and shape[0] != rows:
            raise trying.unfit(
                column,
                made,
                found.shape[1:],
                term.name,
                f"it returned the shape {list(shape)} for {rows} rows, one number, or one per row, was expected",
            )
        if weighted and not shape:
            raise DataError(
                f"a loss ({term.name}) that returns one number per batch was found together with sample_weight_col, "
                "one that returns a number per row was expected; do not take the mean over the rows in it"
            )


def _of_rows(output: Any, rows: int) -> Any:
    """Returns an output of as many rows, with its mask if it has one: its own rows over and over."""
    places = np.arange(rows) % ROWS
    made = keras.ops.take(output, places, axis=0)
    mask = getattr(output, "_keras_mask", None)
    if mask is not None:
        made._keras_mask = keras.ops.take(mask, places, axis=0)
    return made
