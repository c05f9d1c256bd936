"""What ``fit`` notes of columns, inputs and outputs, found out for a model that was not trained by it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkvod.data.schema import Column, from_spark, quoted
from sparkvod.errors import DataError
from sparkvod.estimators import trying
from sparkvod.estimators.columns import Input, OutputSpec, as_dict
from sparkvod.estimators.frame import as_plain, row_by_row
from sparkvod.estimators.plan import with_width
from sparkvod.launch.spark import interruptible

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkvod.estimators.model import ModelBase


def describe(model: ModelBase, dataset: DataFrame) -> dict[str, Any]:
    """Returns the metadata that ``transform`` needs, from the DataFrame's schema and a trial on the driver.

    The trial is made with zeros, or with the first rows where the model cannot take zeros.

    Raises:
        DataError: the columns do not fit the model, or their lengths are not known.
        ValueError: a Param is missing.
    """
    names = model.value("feature_columns")
    if model.value("model") is None:
        raise ValueError("model is required: pass model=...")
    _refuse_functions(model.value("model"))
    if not names:
        raise ValueError("feature_columns is required: pass feature_columns=[...] with the names of the model's inputs")
    if not model.output_columns:
        raise ValueError("label_columns is required: pass label_columns=[...], or outputCols=[...]")
    features = _columns(model, dataset, names)
    inputs = model._plan_inputs(features)
    outputs = _outputs(model, dataset, features, inputs)
    if len(outputs) != len(model.output_columns):
        raise DataError(
            f"the model makes {len(outputs)} outputs, and label_columns and outputCols name "
            f"{len(model.output_columns)} ({', '.join(model.output_columns)}): name one per output"
        )
    return {
        "columns": as_dict(features),
        "inputs": [dataclasses.asdict(item) for item in inputs],
        "outputs": [dataclasses.asdict(output) for output in outputs],
    }


def _refuse_functions(model: Any) -> None:
    """Refuses what makes a model in place of the model."""
    if isinstance(model, (type, functools.partial)) or inspect.isroutine(model):
        name = getattr(model, "__name__", "function")
        raise ValueError(f"model must be the model itself, got {name!r}, which makes one: pass model={name}(...)")


def _columns(model: ModelBase, dataset: DataFrame, names: Sequence[str]) -> list[Column]:
    shapes = model.value("input_shapes") or []
    if len(shapes) != len(names):
        shapes = [None] * len(names)
    columns = []
    for name, shape in zip(names, shapes, strict=True):
        data_type = dataset.schema[name].dataType
        column = from_spark(name, data_type.json(), data_type.simpleString(), text=model._takes_text())
        columns.append(with_width(dataset, column, shape))
        if -1 in columns[-1].shape:
            raise DataError(
                f"the length of feature column {name!r} ({data_type.simpleString()}) is not known: pass input_shapes "
                "with one shape per feature column, such as [[-1, 10]]"
            )
    return columns


def _outputs(
    model: ModelBase, dataset: DataFrame, features: Sequence[Column], inputs: tuple[Input, ...]
) -> list[OutputSpec]:
    try:
        return model._try_outputs(inputs, trying.zeros(inputs))
    except Exception as error:
        if dataset.isStreaming:
            raise trying.cannot_take(inputs, error) from error
    rows = _first_rows(dataset, features, inputs)
    try:
        return model._try_outputs(inputs, rows)
    except Exception as error:
        raise trying.cannot_take(inputs, error) from error


def _first_rows(dataset: DataFrame, features: Sequence[Column], inputs: tuple[Input, ...]) -> list[np.ndarray]:
    """Returns the inputs of the first rows.

    Raises:
        DataError: there are too few, or they have nulls.
    """
    names = [column.name for column in features]
    dataset = row_by_row(dataset, names).dropna(subset=[quoted(name) for name in names])
    plain = [as_plain(dataset, column.name, as_dict([column])[column.name], inputs) for column in features]
    found = interruptible(dataset.sparkSession, "trial", dataset.select(*plain).limit(trying.ROWS).collect)
    if len(found) < trying.ROWS:
        raise DataError(
            f"the model cannot take zeros, and the DataFrame has {len(found)} rows without nulls to try it with: "
            f"{trying.ROWS} are needed"
        )
    arrays = {column.name: np.array([row[k] for row in found], column.dtype) for k, column in enumerate(features)}
    return [item.array(arrays, len(found)) for item in inputs]
