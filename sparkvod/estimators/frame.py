"""How a DataFrame's columns reach a Python function, and which columns ``transform`` may add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F  # noqa: N812, as everybody calls it
from pyspark.sql import types as T  # noqa: N812

from sparkvod.data.schema import TEXT, folding, from_spark, quoted
from sparkvod.errors import DataError
from sparkvod.estimators.columns import Input

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def output_column(label: str) -> str:
    """Returns the name of the column that ``transform`` adds for a label, where none is given."""
    return f"{label}__output"


def refuse_taken(dataset: DataFrame, outputs: Sequence[str], cure: str) -> None:
    """Refuses a DataFrame that has one of the output columns already.

    Raises:
        DataError: it has.
    """
    fold = folding(dataset)
    made = set(map(fold, outputs))
    taken = [name for name in dataset.columns if fold(name) in made]
    if taken:
        raise DataError(f"the DataFrame already has the output columns {', '.join(taken)}: {cure}")


def row_by_row(dataset: DataFrame, features: Sequence[str]) -> DataFrame:
    """Returns the same rows by a plan that hands a user-defined function rows instead of a file's column batches.

    Spark 4.3 gives a Python function over a columnar scan (Parquet, ORC) whole batches of it and cannot convert ML
    vectors in them, also those that the function does not take: it raises UNSUPPORTED_DATATYPE. A filter in between
    works on rows. Its condition holds for every row, and the optimizer does not know that; being deterministic, it
    lets other filters pass to the scan.
    """
    if not _scans_vectors(dataset):
        return dataset
    scalars = [name for name in features if not isinstance(dataset.schema[name].dataType, T.UserDefinedType)]
    return dataset.where(F.hash(dataset[quoted((scalars or features)[0])]) >= F.lit(-(2**31)))


def _scans_vectors(dataset: DataFrame) -> bool:
    if not hasattr(dataset, "_jdf"):
        return True  # Spark Connect does not show what a plan reads
    leaves = dataset._jdf.queryExecution().analyzed().collectLeaves()
    return any('"type":"udt"' in str(leaves.apply(i).schema().json()) for i in range(leaves.size()))


def as_plain(dataset: DataFrame, name: str, trained: dict[str, Any], inputs: tuple[Input, ...]) -> Column:
    """Returns a feature column as numbers or lists of numbers: ML vectors are turned into lists."""
    data_type = dataset.schema[name].dataType
    is_vector = isinstance(data_type, T.UserDefinedType)
    # What could not be trained on has no meaning here either: a date would be days, a timestamp microseconds.
    shape, is_text = trained["shape"], trained["dtype"] == TEXT
    found = from_spark(name, data_type.json(), data_type.simpleString(), text=is_text)
    if (found.kind == "vector") != bool(shape) or (found.dtype == TEXT) != is_text:
        expected = f"a vector or an array of {shape[0]} numbers" if shape else "text" if is_text else "a number"
        raise DataError(
            f"feature column {name!r} must be {expected}, as in training, got type {data_type.simpleString()}"
        )
    column = dataset[quoted(name)]
    if not is_vector:
        return column
    is_single = all(item.dtype == "float32" for item in inputs if name in item.columns)
    return vector_to_array(column, "float32" if is_single else "float64")
