"""Whether metrics of the user's own add up over batches and ranks: tried on the driver, on two small batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from sparkvod import log
from sparkvod.errors import DataError
from sparkvod.estimators import trying
from sparkvod.estimators.columns import ColumnLike, Label
from sparkvod.estimators.keras.loop import Loop
from sparkvod.estimators.keras.model_io import labels

_LOG = log.get("estimators")
_TOLERANCE = 1e-2  # a variable may be a half


def require_sums(
    loop: Loop,
    planned: Sequence[Label],
    columns: Sequence[ColumnLike],
    tails: Sequence[tuple[int, ...]],
    weighted: bool,
) -> None:
    """Refuses metrics whose variables after two batches are not the sums of those after each: a maximum, say.

    Keras's own all keep sums, and are not tried.

    Args:
        loop: the model with its metrics, built.
        planned: how columns make labels.
        columns: the label columns.
        tails: the outputs' shapes without the rows, in the labels' order.
        weighted: whether there are sample weights.

    Raises:
        DataError: there is such a metric.
    """
    found = [metric for group in loop.metrics() for metric in getattr(group, "metrics", [group])]
    own = [metric for metric in found if type(metric).__module__.partition(".")[0] != "keras"]
    if not own:
        return
    random = np.random.default_rng(7)
    first, second = (_batch(random, loop, planned, columns, tails, weighted) for _ in range(2))
    try:
        a, b, both = (_after(loop, own, batches) for batches in ([first], [second], [first, second]))
    except Exception:  # it takes rows of zeros, as was tried before; what numbers it takes beside is not known here
        _LOG.debug("metrics cannot be computed of made-up numbers", exc_info=True)
        return
    finally:
        loop.reset_metrics()
    for metric in own:
        for variable, one, other, together in zip(
            metric.variables, a[id(metric)], b[id(metric)], both[id(metric)], strict=True
        ):
            added = (one.astype("float64") + other).astype(together.dtype).astype("float64")
            if not np.allclose(added, together.astype("float64"), _TOLERANCE, 1e-6, equal_nan=True):
                raise DataError(
                    f"the metric {metric.name!r} ({type(metric).__name__}) was found, whose variable {variable.name!r} "
                    f"is {_shown(one)} after a batch, {_shown(other)} after another, and {_shown(together)} after "
                    "both: one that adds up was expected, since what batches and ranks have seen is added up; keep "
                    "sums in it, such as a total and a count that begin at 0, or measure what transform() predicts"
                )


def _batch(
    random: np.random.Generator,
    loop: Loop,
    planned: Sequence[Label],
    columns: Sequence[ColumnLike],
    tails: Sequence[tuple[int, ...]],
    weighted: bool,
) -> tuple[list[Any], list[Any], Any]:
    """Returns made-up labels, outputs and weights."""
    rows, made = trying.ROWS, {}
    for column, term, tail in zip(columns, loop.terms, tails, strict=True):
        shape = (rows, *column.shape)
        classes = tail[-1] if term.takes_classes and tail else 2
        is_whole = term.takes_classes or np.dtype(column.dtype).kind in "iub"
        numbers = random.integers(0, classes, shape) if is_whole else random.uniform(0.1, 0.9, shape)
        made[column.name] = numbers.astype(column.dtype)
    outputs = [random.uniform(0.1, 0.9, (rows, *tail)).astype("float32") for tail in tails]
    weights = random.uniform(0.5, 1.5, rows).astype("float32") if weighted else None
    found = [ops.convert_to_tensor(array) for array in labels(planned, made, rows)]
    return found, [ops.convert_to_tensor(array) for array in outputs], weights


def _after(loop: Loop, metrics: Sequence[Any], batches: Sequence[Any]) -> dict[int, list[np.ndarray]]:
    """Returns the metrics' variables after batches."""
    loop.reset_metrics()
    inputs = [ops.convert_to_tensor(array) for array in trying.zeros(loop.feed.inputs)]
    for found, outputs, weights in batches:
        loop.feed.call(inputs, training=False)  # a metric of the model's own may be in it
        loop.update_metrics(inputs, found, outputs, None if weights is None else ops.convert_to_tensor(weights))
    return {id(metric): [np.array(ops.convert_to_numpy(v)) for v in metric.variables] for metric in metrics}


def _shown(value: np.ndarray) -> str:
    return f"{float(value):.4g}" if value.ndim == 0 else f"{np.array2string(value.ravel()[:3], precision=4)}"
