"""How columns meet the model: planned and checked on the driver, before anything is prepared or starts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkvod import log
from sparkvod.data import Column, PreparedData, request
from sparkvod.data.schema import TEXT, unconvertible
from sparkvod.errors import DataError
from sparkvod.estimators import rows, trying, values
from sparkvod.estimators.columns import Input, Label, OutputSpec
from sparkvod.estimators.params import TableParams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = log.get("estimators")


@dataclass(frozen=True)
class Plan:
    """How columns meet the model: its inputs, its labels and its outputs, one per label."""

    inputs: tuple[Input, ...]
    labels: tuple[Label, ...]
    outputs: list[OutputSpec]


@dataclass(frozen=True)
class Planned:
    """What a task is made of.

    Attributes:
        payload: what the framework packed.
        plan: how columns meet the model; None before that was tried.
        columns: for which features and labels.
    """

    payload: bytes
    plan: Plan | None = None
    columns: tuple[Sequence[Column], Sequence[Column]] = ((), ())


class _Later(Exception):  # noqa: N818
    """The model has to be tried on rows that are not prepared yet."""


class Planning(TableParams):
    """The part of an estimator that holds columns, labels and model against each other."""

    # ---- for the frameworks ---------------------------------------------------------------------------------------

    @abstractmethod
    def _plan(self, payload: bytes, features: Sequence[Any], labels: Sequence[Any]) -> Plan:
        """Tries the model on rows of zeros; ``DataError`` if columns, model, loss and labels do not fit together."""

    def _completed(self, payload: bytes, features: Sequence[Any]) -> bytes:
        """Returns the payload anew, if it could not hold all of the model before the columns were known."""
        return payload

    def _takes(self, plan: Plan) -> Sequence[values.Takes | None]:
        """Returns which values of each label its loss takes; None where that is not known."""
        return [None] * len(plan.labels)

    def _takes_text(self) -> bool:
        """Returns whether features may be text."""
        return False

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _feature_cols(self, columns: Sequence[str]) -> list[str]:
        """Returns the names of the feature columns, all that are nothing else when none were given."""
        if self.value("feature_cols"):
            return list(self.value("feature_cols"))
        others = {*self.value("label_cols"), self.value("sample_weight_col"), self.value("validation")}
        return [name for name in columns if name not in others]

    def _planned(
        self, before: Planned, features: Sequence[Column], labels: Sequence[Column], data: PreparedData | None = None
    ) -> Planned:
        """Tries the model for these columns, unless that has been done: on zeros, or with ``data`` on its first rows.

        Without ``data`` a model that fails on zeros is tried later.
        """
        if before.plan is not None and before.columns == (features, labels):
            return before
        payload = self._completed(before.payload, features) if before.plan is None else before.payload
        names = list(dict.fromkeys(column.name for column in (*features, *labels)))
        try:
            plan = trying.tried(lambda: self._plan(payload, features, labels), lambda: self._first_rows(data, names))
        except _Later:
            return before
        return Planned(payload, plan, (features, labels))

    def _first_rows(self, data: PreparedData | None, names: list[str]) -> dict[str, Any]:
        if data is None:
            raise _Later
        return rows.first(self.value("reader"), data.train, names, trying.ROWS, self.value("transformation_fn"))

    def _check_early(self, dataset: DataFrame, packed: Planned, asked: dict[str, Any]) -> Planned:
        """Checks columns, and model against columns if the schema tells all widths; else that waits for the data."""
        names = asked["feature_cols"]
        if not self.value("feature_cols"):
            for name in names:
                with _taken_by_default():
                    request.check_type(dataset, name, self._takes_text())
        known = {column.name: column for column in request.check(dataset, **asked).columns}
        shapes = self.value("input_shapes") or []
        if len(shapes) != len(names):
            shapes = [None] * len(names)
        features = [with_width(dataset, known[name], shape) for name, shape in zip(names, shapes, strict=True)]
        labels = [with_width(dataset, known[name], None) for name in asked["label_cols"]]
        if any(-1 in column.shape for column in features + labels):
            return packed
        return self._planned(packed, features, labels)

    def _check_prepared(self, data: PreparedData, features: list[str]) -> None:
        """Checks the columns of data that lie in the store: that they are there, and alike in both parts."""
        labels, weight = self.value("label_cols"), self.value("sample_weight_col")
        if not features:
            others = sorted(filter(None, {*labels, weight, self.value("validation")}))
            raise DataError(f"there are no feature columns beside {others}, at least one was expected")
        for name in dict.fromkeys([*features, *labels, *filter(None, [weight])]):
            with _taken_by_default() if name in features and not self.value("feature_cols") else nullcontext():
                column = data.column(name)
            if column.dtype == TEXT and (name not in features or not self._takes_text()):
                raise unconvertible(name, "string")
            if name == weight and column.kind != "scalar":
                raise DataError(f"sample_weight_col {name!r} is a vector, a column of numbers was expected")
            other = column if data.val is None else data.val.column(name)
            if other.shape != column.shape:
                raise DataError(
                    f"column {name!r} has {math.prod(other.shape)} numbers per row in the validation data, "
                    f"{math.prod(column.shape)} were expected, as in the training data"
                )

    def _check_values(self, plan: Plan, data: PreparedData) -> None:
        """Refuses labels with values that their losses cannot take, as far as they are known."""
        weight, ranges = self.value("sample_weight_col"), data.ranges
        if weight in ranges and set(ranges[weight].ends) == {0}:
            _LOG.warning(
                "all sample weights in column %r are 0, so that no row counts, nothing is learned and the loss is 0; "
                "numbers above 0 were expected in some rows",
                weight,
            )
        changers = ("transformation_fn", "train_minibatch_fn")
        if any(name in self.TABLE and self.value(name) is not None for name in changers):
            return  # the loss may be given other values than the data have
        for label, takes in zip(plan.labels, self._takes(plan), strict=True):
            if takes is not None and label.column in ranges:
                values.check(label.column, ranges[label.column], takes)


@contextmanager
def _taken_by_default() -> Iterator[None]:
    """Says why a column that cannot be a feature is one."""
    try:
        yield
    except DataError as error:
        raise DataError(
            f"{error}. It is a feature because no feature_cols were found: then all columns are, other than labels, "
            "weights and validation; pass feature_cols=[...]"
        ) from None


def with_width(dataset: DataFrame, column: Column, shape: Sequence[int] | None) -> Column:
    """Returns the column with its width, if it needs one, and an input shape or the writer of its metadata tells it."""
    if -1 not in column.shape:
        return column
    width = (dataset.schema[column.name].metadata or {}).get("ml_attr", {}).get("num_attrs")  # VectorAssembler's
    if width is None and shape is not None:
        width = abs(math.prod(shape))
    return column.with_width(int(width)) if width else column
