"""A data set with a Unischema, written by Petastorm's own ``materialize_dataset``."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkvod.data.petastorm_compat import for_workers


def schema(images: bool = True) -> Any:
    """Returns a Unischema with one field per codec."""
    from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql import types as T

    fields = [
        UnischemaField("id", np.int64, (), ScalarCodec(T.LongType()), False),
        UnischemaField("x", np.float32, (), ScalarCodec(T.FloatType()), False),
        UnischemaField("small", np.uint8, (), ScalarCodec(T.IntegerType()), False),
        UnischemaField("half", np.float32, (), None, False),
        UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        UnischemaField("packed", np.int32, (4,), CompressedNdarrayCodec(), False),
        UnischemaField("ragged", np.float64, (None, 2), NdarrayCodec(), False),
        UnischemaField("name", np.str_, (), ScalarCodec(T.StringType()), False),
        UnischemaField("maybe", np.int32, (), ScalarCodec(T.IntegerType()), True),
    ]
    if images:
        fields.append(UnischemaField("image", np.uint8, (5, 4, 3), CompressedImageCodec("png"), False))
    return Unischema("Everything", fields)


def row(number: int, images: bool = True) -> dict[str, Any]:
    """Returns the row with this id; all of it follows from the id."""
    found = {
        "id": np.int64(number),
        "x": np.float32(number) / 4,
        "small": np.uint8(number % 250),
        "half": np.float32(number) / 2,
        "matrix": np.full((2, 3), number, np.float32) + np.arange(3, dtype=np.float32),
        "packed": np.arange(number, number + 4, dtype=np.int32),
        "ragged": np.zeros((number % 3 + 1, 2)),
        "name": f"row {number}",
        "maybe": None if number % 10 == 0 else np.int32(number),
    }
    if images:
        found["image"] = (np.arange(60).reshape(5, 4, 3) + number).astype(np.uint8)
    return found


def materialize(spark: Any, folder: str, rows: int = 100, partitions: int = 3, images: bool = True) -> Any:
    """Writes the data set and returns its Unischema."""
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import dict_to_spark_row

    unischema = schema(images)
    url = f"file://{folder}"
    with materialize_dataset(spark, url, unischema, 1):
        encoded = spark.sparkContext.parallelize(range(rows), partitions).map(
            for_workers(lambda number: dict_to_spark_row(unischema, row(number, images)))
        )
        spark.createDataFrame(encoded, unischema.as_spark_schema()).write.mode("overwrite").parquet(url)
    return unischema
