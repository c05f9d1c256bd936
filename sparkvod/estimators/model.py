"""What all fitted models share: their Params, ``transform`` in Arrow batches, saving."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import functions as F  # noqa: N812, as everybody calls it
from pyspark.sql import types as T  # noqa: N812

from sparkvod.data.schema import TEXT, folding, from_spark, quoted
from sparkvod.errors import DataError
from sparkvod.estimators.columns import Input, require_spark
from sparkvod.estimators.params import TableParams
from sparkvod.estimators.persistence import Saved
from sparkvod.estimators.predictor import Output, Predictor

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Models up to this size travel inside the plan; Spark Connect limits its messages, so larger ones go as files there.
_IN_PLAN = 16 << 20

_SCALARS: dict[str, tuple[str, Any]] = {
    "byte": ("int8", T.ByteType()),
    "short": ("int16", T.ShortType()),
    "integer": ("int32", T.IntegerType()),
    "long": ("int64", T.LongType()),
    "float": ("float32", T.FloatType()),
    "double": ("float64", T.DoubleType()),
}
_DOUBLE = _SCALARS["double"]


def output_of(name: str, spark_type: str, tail: tuple[int, ...]) -> Output:
    """Returns what column an output of shape ``[rows, *tail]`` becomes for a label of the Spark type ``spark_type``.

    A scalar label has a column of its own type, if the output is one number per row (double for a boolean); whole
    numbers are
    rounded. A label that is an array has an array of its element type. Everything else is an ML vector.

    Args:
        name: name of the column.
        spark_type: the label's type as JSON.
        tail: shape of the output without the rows.
    """
    label = json.loads(spark_type)
    if isinstance(label, str) and math.prod(tail) == 1:
        return Output(name, tail, _SCALARS.get(label, _DOUBLE)[0], False, False)
    if isinstance(label, dict) and label.get("type") == "array":
        return Output(name, tail, _SCALARS.get(label["elementType"], _DOUBLE)[0], True, False)
    return Output(name, tail, "float64", True, True)


class ModelBase(TableParams, Saved, Model):
    """Base of fitted models.

    Attributes:
        timings: seconds that ``fit`` spent: ``preparing``, ``starting``, ``training``, ``collecting``, ``total``; empty
            for a model that was loaded.
        workers: for each rank, the ``rows`` that it trained on and the row groups that it ``decoded`` for them.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.timings: dict[str, float] = {}
        self.workers: list[dict[str, int]] = []
        self._sent: set[tuple[str, str]] = set()
        super().__init__(**kwargs)

    # ---- for the frameworks ---------------------------------------------------------------------------------------

    @abstractmethod
    def _predictor(self, inputs: tuple[Input, ...], outputs: tuple[Output, ...], widths: dict[str, int]) -> Predictor:
        """Returns the model as it travels."""

    # ---- transform ------------------------------------------------------------------------------------------------

    @property
    def output_columns(self) -> list[str]:
        """Names of the columns that ``transform`` adds."""
        names = self.value("outputCols")
        labels = self.value("label_columns")
        if names is None:
            return [f"{label}__output" for label in labels]
        if len(names) != len(labels):
            raise ValueError(f"outputCols={names} was found, one name per label ({', '.join(labels)}) was expected")
        return list(names)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        require_spark(dataset, "transform")
        metadata = self.value("_metadata")
        outputs = tuple(
            output_of(name, metadata["columns"][label]["spark_type"], tuple(tail))
            for name, label, tail in zip(
                self.output_columns, self.value("label_columns"), metadata["outputs"], strict=True
            )
        )
        features = self.value("feature_columns")
        self._check_columns(dataset, features, outputs)
        inputs = tuple(Input(tuple(item["columns"]), tuple(item["tail"]), item["dtype"]) for item in metadata["inputs"])
        widths = {name: math.prod(metadata["columns"][name]["shape"] or [0]) for name in features}
        predictor = self._ship(dataset, self._predictor(inputs, outputs, widths))
        columns = [_as_plain(dataset, name, metadata["columns"][name], inputs) for name in features]
        hidden = "__sparkvod_" + predictor.key[:8]
        found = dataset.withColumn(hidden, _udf(predictor)(*columns))
        for number, output in enumerate(outputs):
            column = F.col(f"{hidden}.o{number}")
            found = found.withColumn(output.name, array_to_vector(column) if output.is_vector else column)
        return found.drop(hidden)

    def _check_columns(self, dataset: DataFrame, features: list[str], outputs: tuple[Output, ...]) -> None:
        missing = [name for name in features if name not in dataset.columns]
        if missing:
            raise DataError(
                f"a DataFrame without the feature columns {', '.join(missing)} was found; it has "
                f"{', '.join(dataset.columns)}"
            )
        # Where Spark does not tell case, withColumn would put Y in place of y without a word.
        fold = folding(dataset)
        times = Counter(map(fold, dataset.columns))
        twice = [name for name in features if times[fold(name)] > 1]
        if twice:
            raise DataError(
                f"a DataFrame with more than one feature column {', '.join(twice)} was found, each once was expected; "
                f"it has {', '.join(dataset.columns)}: rename them"
            )
        made = Counter(fold(output.name) for output in outputs)
        if max(made.values()) > 1:
            raise DataError(
                f"the columns {', '.join(output.name for output in outputs)} were to be made, a name of its own for "
                "each was expected; call setOutputCols"
            )
        taken = [name for name in dataset.columns if fold(name) in made]
        if taken:
            raise DataError(
                f"a DataFrame that already has {', '.join(taken)} was found, another name for the prediction "
                "was expected; "
                "call setOutputCols"
            )

    def _ship(self, dataset: DataFrame, predictor: Predictor) -> Predictor:
        """Returns the predictor without its content, which goes ahead as a file, where the plan would be too large."""
        if len(predictor.content) <= _IN_PLAN or not type(dataset).__module__.startswith("pyspark.sql.connect"):
            return predictor
        spark: Any = dataset.sparkSession
        sent = (str(getattr(spark, "session_id", id(spark))), predictor.key)
        if sent not in self._sent:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / predictor.key
                path.write_bytes(predictor.content)
                spark.addArtifacts(str(path), file=True)
            self._sent.add(sent)
        return dataclasses.replace(predictor, content=b"")


def _as_plain(dataset: DataFrame, name: str, trained: dict[str, Any], inputs: tuple[Input, ...]) -> Column:
    """Returns a feature column as numbers or lists of numbers: ML vectors are turned into lists."""
    data_type = dataset.schema[name].dataType
    is_vector = isinstance(data_type, T.UserDefinedType)
    # What could not be trained on has no meaning here either: a date would be days, a timestamp microseconds.
    shape, is_text = trained["shape"], trained["dtype"] == TEXT
    found = from_spark(name, data_type.json(), data_type.simpleString(), text=is_text)
    if (found.kind == "vector") != bool(shape) or (found.dtype == TEXT) != is_text:
        expected = f"a vector or an array of {shape[0]} numbers" if shape else "text" if is_text else "a number"
        raise DataError(
            f"feature column {name!r} of type {data_type.simpleString()} was found, {expected} was expected, as in "
            "training"
        )
    column = dataset[quoted(name)]
    if not is_vector:
        return column
    is_single = all(item.dtype == "float32" for item in inputs if name in item.columns)
    return vector_to_array(column, "float32" if is_single else "float64")


def _udf(predictor: Predictor) -> Any:
    """Returns the user-defined function of the feature columns: over Arrow arrays, or over pandas before Spark 4.1."""
    fields = []
    for number, output in enumerate(predictor.outputs):
        scalar = next(kind for dtype, kind in _SCALARS.values() if dtype == output.dtype)
        fields.append(T.StructField(f"o{number}", T.ArrayType(scalar) if output.is_list else scalar))
    returned = T.StructType(fields)
    if hasattr(F, "arrow_udf"):

        def in_arrow(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            return predictor.predict_all(batches)

        in_arrow.__annotations__ = {"batches": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
        arrow_udf: Any = F.arrow_udf  # its overloads know no structs
        return arrow_udf(in_arrow, returned)
    return pandas_udf(predictor, returned)


def pandas_udf(predictor: Predictor, returned: T.StructType) -> Any:
    """Returns the same function over pandas."""
    import pandas as pd

    def in_pandas(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        tuples = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        arrays = (tuple(pa.Array.from_pandas(series) for series in batch) for batch in tuples)
        for struct in predictor.predict_all(arrays):
            yield pa.Table.from_batches([pa.RecordBatch.from_struct_array(struct)]).to_pandas()

    in_pandas.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": Iterator[pd.DataFrame]}
    pandas_udf_: Any = F.pandas_udf
    return pandas_udf_(in_pandas, returned)
