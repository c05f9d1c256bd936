"""Which columns can become tensors, and what is known of them.

A scalar column becomes a 1-D array ``[rows]``, a vector column (an array of numbers, or an ML vector, of one length) a
2-D array ``[rows, width]``. A column of text becomes a 1-D array of ``str`` objects, for those who ask for it: models
that look words up themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from sparkvod.errors import DataError

CONVERTIBLE = (
    "boolean, tinyint, smallint, int, bigint, float, double, array of one of these, and ML vectors (dense or sparse)"
)
_SPARK_DTYPES = {
    "boolean": "bool",
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
}
TEXT = "object"
"""The dtype of columns of text."""
DECODE = "decode its bytes by their own encoding first, for example with decode(binary_column, 'ISO-8859-1')"
"""What to do about text that is not valid UTF-8."""
_TEXT_BYTES = 64
"""What a text is taken to need in memory."""
_ARROW_DTYPES = {str(pa.from_numpy_dtype(dtype)): (dtype, spark) for spark, dtype in _SPARK_DTYPES.items()}


@dataclass(frozen=True)
class Column:
    """A column that can become a tensor.

    Attributes:
        name: its name in the DataFrame and in the Parquet files.
        kind: ``scalar`` or ``vector``.
        dtype: numpy dtype of the elements; :data:`TEXT` for text.
        shape: shape of one row's value: ``()`` or ``(width,)``; ``(-1,)`` while the width is not known.
        spark_type: the Spark type as JSON text (``DataType.json()``), for the schema of what a model returns.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    spark_type: str

    @property
    def is_ml_vector(self) -> bool:
        """True when the column is an ML vector (``VectorUDT``) in the DataFrame."""
        parsed = json.loads(self.spark_type)
        return isinstance(parsed, dict) and parsed.get("type") == "udt"

    @property
    def is_float(self) -> bool:
        """True when values may be NaN."""
        return self.dtype.startswith("float")

    def with_width(self, width: int) -> Column:
        """Returns the column with its width known."""
        return replace(self, shape=(width,))

    def to_json(self) -> dict[str, Any]:
        """Returns what ``json.dumps`` takes."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Column:
        """Returns the column that :meth:`to_json` was called on."""
        return Column(**{**value, "shape": tuple(value["shape"])})


def from_spark(name: str, type_json: str, type_text: str, text: bool = False) -> Column:
    """Returns the metadata of a Spark column.

    Args:
        name: the column's name.
        type_json: ``DataType.json()``.
        type_text: ``DataType.simpleString()``, for the message.
        text: whether a column of text is taken.

    Raises:
        DataError: its type cannot become a tensor.
    """
    parsed = json.loads(type_json)
    if isinstance(parsed, str) and parsed in _SPARK_DTYPES:
        return Column(name, "scalar", _SPARK_DTYPES[parsed], (), type_json)
    if text and isinstance(parsed, str) and re.match(r"string|varchar|char", parsed):
        return Column(name, "scalar", TEXT, (), json.dumps("string"))
    if isinstance(parsed, dict):
        element = parsed.get("elementType")
        if parsed.get("type") == "array" and isinstance(element, str) and element in _SPARK_DTYPES:
            return Column(name, "vector", _SPARK_DTYPES[element], (-1,), type_json)
        if parsed.get("type") == "udt" and str(parsed.get("class", "")).endswith("linalg.VectorUDT"):
            return Column(name, "vector", "float64", (-1,), type_json)
    raise unconvertible(name, type_text)


def from_arrow(name: str, arrow_type: pa.DataType, text: bool = False) -> Column | None:
    """Returns the metadata of a column of a Parquet file, None when it cannot become a tensor.

    Args:
        name: the column's name.
        arrow_type: its type.
        text: whether a column of text is taken.
    """
    if text and (pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)):
        return Column(name, "scalar", TEXT, (), json.dumps("string"))
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        if str(arrow_type.value_type) not in _ARROW_DTYPES:
            return None
        dtype, spark = _ARROW_DTYPES[str(arrow_type.value_type)]
        width = arrow_type.list_size if pa.types.is_fixed_size_list(arrow_type) else -1
        array = {"type": "array", "elementType": spark, "containsNull": False}
        return Column(name, "vector", dtype, (width,), json.dumps(array))
    if str(arrow_type) not in _ARROW_DTYPES:
        return None
    dtype, spark = _ARROW_DTYPES[str(arrow_type)]
    return Column(name, "scalar", dtype, (), json.dumps(spark))


def unconvertible(name: str, type_text: str) -> DataError:
    """Returns the error for a column whose type cannot become a tensor."""
    if re.match(r"struct<type: int8.*, size: int32.*, indices: .*, values: ", type_text):
        # What Spark writes for an ML vector: its Parquet does not say that it is one.
        return DataError(
            f"column {name!r} has the type {type_text}, as Spark writes ML vectors, an array column was expected in "
            "Parquet files; write it as an array with pyspark.ml.functions.vector_to_array, or call fit() on the "
            "DataFrame, which takes ML vectors"
        )
    if re.match(r"decimal|numeric", type_text):
        hint = "cast it to double"
    elif re.match(r"date|timestamp|time", type_text):
        hint = "make numbers of it (for example with hour, dayofyear, unix_date, unix_seconds)"
    elif re.match(r"(array|list)<", type_text):
        hint = "flatten it, or cast its elements"
    elif type_text.startswith("struct<"):
        hint = "select its fields as columns (df.select('*', 'column.field')), or assemble them with VectorAssembler"
    elif "string" in type_text:
        hint = (
            "index or encode it first (for example with StringIndexer), or give it to a Keras model whose Input has "
            "dtype='string' (StringLookup, TextVectorization)"
        )
    else:
        hint = "cast it or leave it out"
    return DataError(
        f"column {name!r} has the type {type_text}, which cannot become a tensor; the types that can are "
        f"{CONVERTIBLE}; {hint}"
    )


def _undecodable(texts: pa.Array) -> list[bytes]:
    def is_valid(value: bytes) -> bool:
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
        return True

    return [value for value in texts.cast(pa.binary()).drop_null().to_pylist() if not is_valid(value)]


def invalid_utf8(texts: pa.Array) -> int:
    """Returns how many texts have bytes that are not valid UTF-8, which Spark's strings and Parquet files may have."""
    return len(_undecodable(texts))


def require_utf8(name: str, texts: pa.Array) -> None:
    """Refuses text with bytes that are not valid UTF-8.

    Raises:
        DataError: there is some.
    """
    wrong = _undecodable(texts)
    if wrong:
        raise DataError(f"column {name!r} has text that is not valid UTF-8, such as {wrong[0][:40]!r}: {DECODE}")


def arrow_field(column: Column) -> pa.Field:
    """Returns the field of a prepared Parquet file: nothing in it is null, so that no levels need decoding."""
    element = pa.string() if column.dtype == TEXT else pa.from_numpy_dtype(column.dtype)
    if column.kind == "scalar":
        return pa.field(column.name, element, nullable=False)
    return pa.field(
        column.name, pa.list_(pa.field("element", element, nullable=False), column.shape[0]), nullable=False
    )


def quoted(name: str) -> str:
    """Returns a column's name as Spark takes it whole, with the dots in it."""
    return f"`{name.replace('`', '``')}`"


def folding(df: Any) -> Callable[[str], str]:
    """Returns what makes names equal that Spark takes for one: their lower case, unless it is told to tell case."""
    text = str(df.sparkSession.conf.get("spark.sql.caseSensitive", "false"))
    return str if text.lower() == "true" else str.lower


def row_nbytes(columns: list[Column] | tuple[Column, ...]) -> int:
    """Returns the bytes of one decoded row."""
    return sum(_TEXT_BYTES if c.dtype == TEXT else np.dtype(c.dtype).itemsize * max(1, *c.shape, 1) for c in columns)
