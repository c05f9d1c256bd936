"""What is asked of a preparation, checked against the DataFrame's schema before any job runs."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkvod.data.schema import Column, folding, from_spark
from sparkvod.errors import DataError


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        columns: the columns to write, features first, each once.
        weight: name of the column of sample weights.
        split: name of the column that marks validation rows.
        fraction: else the fraction of rows for validation.
        seed: decides which rows these are.
        labels: names of the labels. What was prepared with the same columns is the same, whichever of them are labels.
    """

    columns: tuple[Column, ...]
    weight: str | None
    split: str | None
    fraction: float
    seed: int
    labels: tuple[str, ...] = field(default=(), compare=False)


def check(
    df: Any,
    label_cols: Sequence[str],
    feature_cols: Sequence[str] | None,
    sample_weight_col: str | None,
    validation: float | str | None,
    seed: int | None,
    text: bool = False,
) -> Request:
    """Returns the request, if the DataFrame's schema fits it; the arguments are those of ``sparkvod.data.prepare``.

    Raises:
        DataError: a column is missing or has a type that cannot become a tensor, or the validation makes no sense.
    """
    fields = {entry.name: entry.dataType for entry in df.schema.fields}
    fold = folding(df)
    times = Counter(fold(entry.name) for entry in df.schema.fields)
    labels = _names("label_cols", label_cols)
    if not labels:
        raise DataError("label_cols is empty, at least one column was expected; name the column to predict")
    split = validation if isinstance(validation, str) else None
    special = {*labels, sample_weight_col, split}
    features = (
        [name for name in fields if name not in special]
        if feature_cols is None
        else _names("feature_cols", feature_cols)
    )
    if not features:
        raise DataError(
            f"there are no feature columns beside {sorted(filter(None, special))}, at least one was expected"
        )
    wanted = [*features, *labels, *filter(None, [sample_weight_col, split])]
    for name in wanted:
        if name not in fields:
            raise _missing(name, list(fields))
        if times[fold(name)] > 1:
            alike = sorted({other for other in fields if fold(other) == fold(name)} - {name})
            also = f", {', '.join(map(repr, alike))} among them, which Spark takes for the same name" if alike else ""
            raise DataError(f"the DataFrame has more than one column {name!r}{also}, one was expected; rename them")
    others = {*labels, sample_weight_col, split}
    columns = {
        name: _column(name, fields[name], text and name not in others)
        for name in wanted
        if name != split or name in (*features, *labels)
    }
    if sample_weight_col is not None and columns[sample_weight_col].kind != "scalar":
        raise DataError(f"sample_weight_col {sample_weight_col!r} is a vector, a column of numbers was expected")
    if split is not None:
        column = _column(split, fields[split])
        if column.kind != "scalar" or column.is_float:
            raise DataError(
                f"the validation column {split!r} has the type {fields[split].simpleString()}, boolean or a whole "
                "number was expected (true or above 0: a row for validation); cast it"
            )
    return Request(
        tuple(columns.values()),
        sample_weight_col,
        split,
        _fraction(validation),
        0 if seed is None else int(seed),
        tuple(labels),
    )


def check_type(df: Any, name: str, text: bool = False) -> None:
    """Raises ``DataError`` if the type of a DataFrame's column cannot become a tensor; with ``text``, or be text."""
    _column(name, df.schema[name].dataType, text)


def _names(parameter: str, value: Sequence[str]) -> list[str]:
    if isinstance(value, str):
        raise DataError(f"{parameter}={value!r} was found, a list of column names was expected; write [{value!r}]")
    return list(value)


def _fraction(validation: float | str | None) -> float:
    if validation is None or isinstance(validation, str):
        return 0.0
    if isinstance(validation, bool) or not isinstance(validation, (int, float)) or not 0 <= validation < 1:
        raise DataError(
            f"validation={validation!r} was found, a fraction from 0 to less than 1, or the name of a boolean or "
            "whole-number column was expected"
        )
    return float(validation)


def _missing(name: str, names: list[str]) -> DataError:
    lower = {other.lower(): other for other in names}
    close = [lower[found] for found in difflib.get_close_matches(name.lower(), list(lower), 1)]
    hint = f"did you mean {close[0]!r}? " if close else ""
    return DataError(f"no column {name!r} in the DataFrame; {hint}the columns are {', '.join(names)}")


def _column(name: str, data_type: Any, text: bool = False) -> Column:
    return from_spark(name, data_type.json(), data_type.simpleString(), text)
