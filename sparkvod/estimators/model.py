"""What all fitted models share: their Params, ``transform`` in Arrow batches, saving."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F  # noqa: N812, as everybody calls it
from pyspark.sql import types as T  # noqa: N812

from sparkvod.data.schema import folding
from sparkvod.errors import DataError
from sparkvod.estimators import pretrained
from sparkvod.estimators.columns import ColumnLike, Input, OutputSpec, require_spark
from sparkvod.estimators.frame import as_plain, output_column, refuse_taken, row_by_row
from sparkvod.estimators.params import TableParams
from sparkvod.estimators.persistence import Saved
from sparkvod.estimators.predictor import Output, Predictor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Models up to this size travel inside the plan; Spark Connect limits its messages, so larger ones go as files there.
_IN_PLAN = 16 << 20

_SINGLE = ("float32", "float16", "bfloat16")


def output_of(name: str, spec: OutputSpec) -> Output:
    """Returns the column that an output becomes. Its type follows from the output alone, never from the label's type.

    One number per row is a float where the output has single precision or less, else a double. Several are an ML
    vector.
    """
    if math.prod(spec.tail) == 1:
        return Output(name, spec.tail, "float32" if spec.dtype in _SINGLE else "float64", False)
    return Output(name, spec.tail, "float64", True)


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

    @abstractmethod
    def _plan_inputs(self, features: Sequence[ColumnLike]) -> tuple[Input, ...]:
        """Returns how feature columns make the model's inputs, by the Params; ``DataError`` if they do not fit."""

    @abstractmethod
    def _try_outputs(self, inputs: tuple[Input, ...], arrays: Sequence[np.ndarray]) -> list[OutputSpec]:
        """Returns the outputs that the model makes of these inputs."""

    def _takes_text(self) -> bool:
        """Returns whether features may be text."""
        return False

    # ---- transform ------------------------------------------------------------------------------------------------

    @property
    def output_columns(self) -> list[str]:
        """Names of the columns that ``transform`` adds."""
        names = self.value("outputCols")
        labels = self.value("label_columns")
        if names is None:
            return [output_column(label) for label in labels or []]
        if labels is not None and len(names) != len(labels):
            raise ValueError(f"outputCols={names} was found, one name per label ({', '.join(labels)}) was expected")
        return list(names)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        require_spark(dataset, "transform")
        features = self.value("feature_columns")
        self._check_columns(dataset, features or [])
        metadata = self.value("_metadata") or pretrained.describe(self, dataset)
        outputs = tuple(
            output_of(name, OutputSpec(tuple(item["tail"]), item["dtype"]))
            for name, item in zip(self.output_columns, metadata["outputs"], strict=True)
        )
        inputs = tuple(Input(tuple(item["columns"]), tuple(item["tail"]), item["dtype"]) for item in metadata["inputs"])
        widths = {name: math.prod(metadata["columns"][name]["shape"] or [0]) for name in features}
        predictor = self._ship(dataset, self._predictor(inputs, outputs, widths))
        dataset = row_by_row(dataset, features)
        columns = [as_plain(dataset, name, metadata["columns"][name], inputs) for name in features]
        hidden = "__sparkvod_" + predictor.key[:8]
        found = dataset.withColumn(hidden, _udf(predictor)(*columns))
        for number, output in enumerate(outputs):
            column = F.col(f"{hidden}.o{number}")
            found = found.withColumn(output.name, array_to_vector(column) if output.is_vector else column)
        return found.drop(hidden)

    def _check_columns(self, dataset: DataFrame, features: list[str]) -> None:
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
        made = Counter(map(fold, self.output_columns))
        if made and max(made.values()) > 1:
            raise DataError(
                f"the output columns {', '.join(self.output_columns)} must have different names: call setOutputCols"
            )
        refuse_taken(dataset, self.output_columns, "call setOutputCols with other names, or drop them")

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


def _udf(predictor: Predictor) -> Any:
    """Returns the user-defined function of the feature columns: over Arrow arrays, or over pandas before Spark 4.1."""
    fields = []
    for number, output in enumerate(predictor.outputs):
        scalar = T.FloatType() if output.dtype == "float32" else T.DoubleType()
        fields.append(T.StructField(f"o{number}", T.ArrayType(scalar) if output.is_vector else scalar))
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
