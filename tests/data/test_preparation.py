"""DataFrame -> Parquet: content, layout, validation, reuse, and every kind of bad input."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from sparkvod.data import FilesystemStore, PreparedData, Store, clean, open_prepared, open_reader, prepare, release
from sparkvod.data.claims import claim
from sparkvod.data.identity import prove
from sparkvod.data.preparation import _clean, _entries
from sparkvod.data.readers.decode import Decoder
from sparkvod.errors import DataError, StoreError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return Store.create(str(tmp_path / "store"))


def data_sets(store: FilesystemStore) -> list[str]:
    """Returns the names of the data sets' directories in the store."""
    if not os.path.exists(store.prefix_path):
        return []
    return sorted(name for name in os.listdir(store.prefix_path) if name.startswith("intermediate"))


def read(prepared: PreparedData, part: str = "train") -> dict[str, np.ndarray]:
    """Returns the columns of one part, in the order of the data."""
    dataset = getattr(prepared, part)
    tables = [pq.read_table(os.path.join(dataset.path, name)) for name in dataset.files]
    return {
        column.name: np.concatenate([np.array(table.column(column.name).to_pylist()) for table in tables])
        for column in dataset.columns
    }


def frame(spark: Any, rows: int = 100, partitions: int = 3) -> Any:
    """A DataFrame of column id and what follows from it, with an empty partition if there are rows for few only."""
    return spark.range(0, rows, 1, partitions).selectExpr("id", "cast(id as double) / 2 as x", "id % 2 as y")


# -- content and layout -------------------------------------------------------------------------------------------


def test_types_values_and_order(spark: Any, store: FilesystemStore) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [
        (i, i % 2 == 0, float(i), [float(i), 0.5], Vectors.dense([i, 1.0, 2.0]) if i % 2 else Vectors.sparse(3, {0: i}))
        for i in range(20)
    ]
    schema = "id long, flag boolean, r double, a array<float>"
    df = spark.createDataFrame([row[:4] for row in rows], schema).join(
        spark.createDataFrame([(row[0], row[4]) for row in rows], ["id", "v"]), "id"
    )
    df = df.selectExpr(
        "id",
        "flag",
        "cast(id as byte) b",
        "cast(id as short) s",
        "cast(id as int) i",
        "cast(r as float) f",
        "r",
        "a",
        "v",
    ).coalesce(1)
    prepared = prepare(df, store, label_cols=["r"])
    columns = {column.name: (column.kind, column.dtype, column.shape) for column in prepared.schema}
    assert columns == {
        "id": ("scalar", "int64", ()),
        "flag": ("scalar", "bool", ()),
        "b": ("scalar", "int8", ()),
        "s": ("scalar", "int16", ()),
        "i": ("scalar", "int32", ()),
        "f": ("scalar", "float32", ()),
        "r": ("scalar", "float64", ()),
        "a": ("vector", "float32", (2,)),
        "v": ("vector", "float64", (3,)),
    }
    assert prepared.column("v").is_ml_vector
    assert not prepared.column("a").is_ml_vector
    found = read(prepared)
    ids = found["id"]
    assert sorted(ids) == list(range(20))
    np.testing.assert_array_equal(found["flag"], ids % 2 == 0)
    np.testing.assert_array_equal(found["a"], np.stack([ids, np.full(20, 0.5)], axis=1))
    odd = ids % 2
    np.testing.assert_array_equal(found["v"], np.stack([ids, odd, 2 * odd], axis=1))
    with open_reader("auto", prepared.train, None, 8) as reader:
        batches = list(reader.epoch(0))
    assert sum(batch.rows for batch in batches) == 20
    assert batches[0].columns["v"].dtype == np.float64
    assert open_prepared(store, prepared.idx).fingerprint == prepared.fingerprint


def test_uneven_partitions_make_even_groups(spark: Any, store: FilesystemStore) -> None:
    df = spark.range(0, 9000, 1, 1).union(spark.range(0, 0, 1, 1)).union(spark.range(9000, 9101, 1, 1))
    prepared = prepare(df.selectExpr("id", "id as y"), store, label_cols=["y"])
    assert prepared.train.rows == 9101
    for number in range(len(prepared.train.files)):
        rows = [group.rows for group in prepared.train.row_groups if group.file == number]
        assert len(rows) >= 16
        assert max(rows) - min(rows) <= 1
    assert read(prepared)["id"].tolist() == list(range(9101))


def test_each_row_is_evaluated_once_and_layout_ignores_ranks(spark: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def mark(batches: Any) -> Any:
        for batch in batches:
            with open(f"{marks}/{os.getpid()}", "a") as file:
                file.writelines(f"{value}\n" for value in batch.column(0).to_pylist())
            yield batch

    df = spark.range(0, 1000, 1, 4).mapInArrow(mark, "id long").selectExpr("id", "id as y")
    fingerprints = set()
    for number, num_proc in enumerate((1, 3), 1):
        store = Store.create(str(tmp_path / f"store{num_proc}"))
        prepared = prepare(df, store, label_cols=["y"], validation=0.2, num_proc=num_proc)
        assert not prepared.reused
        fingerprints.add(prepared.fingerprint)
        seen = [int(line) for path in marks.iterdir() for line in path.read_text().split()]
        assert sorted(seen) == sorted(list(range(1000)) * number)
    assert len(fingerprints) == 1


def test_validation_by_fraction(spark: Any, store: FilesystemStore) -> None:
    df = frame(spark, 1000, 7)
    first = prepare(df, store, label_cols=["y"], validation=0.25, seed=3)
    train, val = read(first)["id"], read(first, "val")["id"]
    assert sorted([*train, *val]) == list(range(1000))
    assert abs(len(val) - 250) <= 3
    again = prepare(df.filter("id >= 0"), store, label_cols=["y"], validation=0.25, seed=3)
    np.testing.assert_array_equal(read(again, "val")["id"], val)
    other = prepare(df, store, label_cols=["y"], validation=0.25, seed=4)
    assert read(other, "val")["id"].tolist() != val.tolist()
    # Ten partitions of one row: one row in ten must still be found.
    tiny = prepare(frame(spark, 10, 10), store, label_cols=["y"], validation=0.1)
    assert tiny.val is not None
    assert tiny.val.rows in (1, 2)


@pytest.mark.parametrize(
    "rule", ["id % 5 = 0", "cast(id % 5 = 0 as int)", "cast(case when id % 5 = 0 then 3 else -1 end as byte)"]
)
def test_validation_by_column(spark: Any, store: FilesystemStore, rule: str) -> None:
    df = frame(spark).selectExpr("*", f"{rule} as held_out")
    prepared = prepare(df, store, label_cols=["y"], validation="held_out")
    assert sorted(read(prepared, "val")["id"]) == list(range(0, 100, 5))
    assert "held_out" not in [column.name for column in prepared.schema]


def test_sample_weights_and_chosen_features(spark: Any, store: FilesystemStore) -> None:
    df = frame(spark).selectExpr("*", "id * 1.5d as w", "'text' as unused")
    prepared = prepare(df, store, label_cols=["y"], feature_cols=["x"], sample_weight_col="w")
    assert [column.name for column in prepared.schema] == ["x", "y", "w"]


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_cols": ["Y"]}, r"no column 'Y'.*did you mean 'y'\? the columns are id, x, y, s"),
        ({"label_cols": ["y"], "feature_cols": ["missing"]}, "no column 'missing'"),
        ({"label_cols": ["y"], "feature_cols": "x"}, "feature_cols='x'.*a list"),
        ({"label_cols": []}, "label_cols is empty"),
        ({"label_cols": ["s"], "feature_cols": ["x"]}, "column 's' has the type string.*double.*StringIndexer"),
        ({"label_cols": ["y"]}, "column 's' has the type string"),
        ({"label_cols": ["y"], "feature_cols": ["d"]}, "column 'd' has the type decimal.*cast it to double"),
        ({"label_cols": ["y"], "feature_cols": ["n"]}, "column 'n' has the type array<array.*types that can.*flatten"),
        ({"label_cols": ["y"], "feature_cols": ["t"]}, "column 't' has the type date.*types that can.*dayofyear"),
        ({"label_cols": ["u"], "feature_cols": ["x"]}, "column 'u' has the type timestamp.*types that can.*hour"),
        ({"label_cols": ["y"], "feature_cols": ["x"], "validation": "part"}, "no column 'part'"),
        ({"label_cols": ["y"], "feature_cols": ["x"], "validation": "x"}, "validation column 'x' has the type double"),
        ({"label_cols": ["y"], "feature_cols": ["x"], "validation": 1.5}, "validation=1.5"),
        ({"label_cols": ["y"], "feature_cols": ["x"], "sample_weight_col": "a"}, "sample_weight_col 'a' is a vector"),
    ],
)
def test_bad_requests(spark: Any, store: FilesystemStore, arguments: dict[str, Any], message: str) -> None:
    df = frame(spark).selectExpr(
        "*",
        "'a' as s",
        "cast(1 as decimal(5,2)) as d",
        "array(array(1)) as n",
        "array(1, 2) as a",
        "date'2020-01-01' as t",
        "timestamp'2020-01-01 00:00:00' as u",
    )
    if arguments == {"label_cols": ["y"]}:
        df = df.drop("d", "n", "t", "u")
    with pytest.raises(DataError, match=message):
        prepare(df, store, **arguments)
    assert data_sets(store) == []


def test_names_that_differ_in_case_only(spark: Any, store: FilesystemStore) -> None:
    df = frame(spark).selectExpr("x", "x + 1 as X", "y")
    with pytest.raises(DataError, match="more than one column 'x', 'X' among them, which Spark takes for the same"):
        prepare(df, store, label_cols=["y"], feature_cols=["x"])
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        found = read(prepare(df, store, label_cols=["y"]))
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    np.testing.assert_array_equal(found["X"], found["x"] + 1)


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        (["if(id = 7, null, y) as y"], {}, "column 'y' has nulls in 1 of 100 rows"),
        (
            ["if(id = 7, null, x) as x", "if(id < 5, double('nan'), y) as y"],
            {},
            "'x' has nulls in 1 .*'y' has NaN in 5 ",
        ),
        (["if(id < 40, array(1), array(1, 2)) as v", "y"], {}, r"'v' have 2 .*sizes \(2 in 60 rows, 1 in 40 rows\)"),
        (["array(if(id < 3, null, 1)) as v", "y"], {}, "column 'v' has nulls inside in 3 of 100 rows"),
        (["y", "id > 1000 as h"], {"validation": "h"}, "column 'h' leaves 0 of 100 rows"),
    ],
)
def test_bad_data(
    spark: Any, store: FilesystemStore, columns: list[str], arguments: dict[str, Any], message: str
) -> None:
    df = frame(spark, partitions=2).selectExpr("id as i", *columns)
    with pytest.raises(DataError, match=message):
        prepare(df, store, label_cols=["y"], **arguments)
    assert data_sets(store) == []


def test_null_vectors_are_counted(spark: Any, store: FilesystemStore) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(1.0, Vectors.dense([1.0])), (2.0, None), (3.0, Vectors.dense([1.0, 2.0]))]
    with pytest.raises(DataError, match="column 'v' has nulls in 1 of 3 rows"):
        prepare(spark.createDataFrame(rows, ["y", "v"]), store, label_cols=["y"])


def test_empty_frame(spark: Any, store: FilesystemStore) -> None:
    with pytest.raises(DataError, match="no rows"):
        prepare(frame(spark).filter("id < 0"), store, label_cols=["y"])
    with pytest.raises(DataError, match="no rows"):
        prepare(frame(spark, 0), store, label_cols=["y"])
    assert data_sets(store) == []


def test_a_failing_frame_leaves_nothing_and_loses_nothing(spark: Any, store: FilesystemStore) -> None:
    kept = prepare(frame(spark), store, label_cols=["y"])
    before = data_sets(store)

    def fail(batches: Any) -> Any:
        for batch in batches:
            yield batch
            raise RuntimeError("the user's own error")

    frames = [frame(spark).mapInArrow(fail, "id long, x double, y long")]
    frames.append(frame(spark).withColumn("x", F.udf(lambda x: 1 / (x - x), "double")("x")))
    for failing, words in zip(frames, ("RuntimeError: the user's own error", "ZeroDivisionError"), strict=True):
        with pytest.raises(DataError, match=f"a Python function in the .* plan .*failed.*: {words}(.|\n)*Traceback"):
            prepare(failing, store, label_cols=["y"])
    assert data_sets(store) == before
    assert open_prepared(store, kept.idx).fingerprint == kept.fingerprint


def test_unwritable_store(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "x")

    def fail(batches: Any) -> Any:
        raise AssertionError("a job was run")

    df = frame(spark).mapInArrow(fail, "id long, x double, y long")
    good = str(tmp_path / "good")
    for store in (
        Store.create(below),
        Store.create(good, train_path=below),
        Store.create(good, val_path=below),
    ):
        with pytest.raises(StoreError, match=r"file/x.*cannot be written"):
            prepare(df, store, label_cols=["y"], validation=0.5)
    assert not any(name.startswith("intermediate") for name in os.listdir(good))


def test_bad_numbers(spark: Any, store: FilesystemStore) -> None:
    with pytest.raises(ValueError, match="num_proc=0"):
        prepare(frame(spark), store, label_cols=["y"], num_proc=0)


# -- reuse --------------------------------------------------------------------------------------------------------


def parquet(spark: Any, path: Path, rows: int = 50) -> Any:
    frame(spark, rows).write.mode("overwrite").parquet(str(path))
    time.sleep(0.1)
    return spark.read.parquet(str(path))


def test_same_files_same_plan_are_used_again(spark: Any, store: FilesystemStore, tmp_path: Path) -> None:
    df = parquet(spark, tmp_path / "source").filter("id >= 10")
    first = prepare(df, store, label_cols=["y"])
    again = spark.read.parquet(str(tmp_path / "source")).filter("id >= 10")
    for other in (df, again):
        second = prepare(other, store, label_cols=["y"], num_proc=2)
        assert second.reused
        assert second.idx == first.idx
        assert second.fingerprint == first.fingerprint
    others: list[tuple[Any, dict[str, Any]]] = [
        (df.filter("id >= 11"), {}),
        (df, {"feature_cols": ["x"]}),
        (df, {"validation": 0.5}),
        (df, {"sample_weight_col": "x"}),
    ]
    for changed, arguments in others:
        third = prepare(changed, store, label_cols=["y"], **arguments)
        assert not third.reused
        assert third.idx != first.idx


def test_changed_files_are_never_stale(spark: Any, store: FilesystemStore, tmp_path: Path) -> None:
    path = tmp_path / "source"
    first = prepare(parquet(spark, path), store, label_cols=["y"])
    second = prepare(parquet(spark, path, 60), store, label_cols=["y"])
    assert (second.train.rows, second.reused) == (60, False)
    assert second.idx != first.idx
    # One file changed in place, its name and size being as before.
    name = sorted(path.glob("*.parquet"))[0]
    table = pq.read_table(name)
    pq.write_table(table.set_column(2, "y", [np.full(len(table), 5)]), name, compression="snappy")
    for crc in path.glob(".*.crc"):
        crc.unlink()
    time.sleep(0.1)
    third = prepare(spark.read.parquet(str(path)), store, label_cols=["y"])
    assert not third.reused
    assert 5 in read(third)["y"]


@pytest.mark.parametrize(
    "make",
    [
        lambda spark, df: df.selectExpr("*", "rand() as r"),
        lambda spark, df: spark.createDataFrame([(1, 2.0, 3)], ["id", "x", "y"]),
    ],
    ids=["rand", "rdd"],
)
def test_what_cannot_be_proved_is_prepared_again(spark: Any, store: FilesystemStore, tmp_path: Path, make: Any) -> None:
    df = make(spark, parquet(spark, tmp_path / "source"))
    first = prepare(df, store, label_cols=["y"])
    second = prepare(df, store, label_cols=["y"])
    assert not second.reused
    assert first.idx != second.idx
    # Both can be deleted once they are released.
    release(first)
    prepare(df, store, label_cols=["y"])
    assert not os.path.exists(os.path.join(first.train.path, first.train.files[0]))
    assert os.path.exists(os.path.join(second.train.path, second.train.files[0]))


def test_ranges_are_used_again(spark: Any, store: FilesystemStore) -> None:
    first = prepare(frame(spark), store, label_cols=["y"])
    assert prepare(frame(spark), store, label_cols=["y"]).reused
    assert not prepare(frame(spark, 101), store, label_cols=["y"]).reused
    assert (
        prepare(
            spark.range(100, numPartitions=3).selectExpr("id", "cast(id as double) / 2 as x", "id % 2 as y"),
            store,
            label_cols=["y"],
        ).idx
        == first.idx
    )


def test_equal_plans_of_other_names_are_other_data(spark: Any, store: FilesystemStore) -> None:
    df = spark.range(50).selectExpr("id", "id * 0.5 as half", "id % 2 as y")
    arguments: dict[str, Any] = {"feature_cols": ["a", "b"], "label_cols": ["y"]}
    prepare(df.selectExpr("cast(id as double) as a", "cast(half as double) as b", "y"), store, **arguments)
    other = prepare(df.selectExpr("cast(id as double) as b", "cast(half as double) as a", "y"), store, **arguments)
    assert not other.reused
    np.testing.assert_array_equal(read(other)["b"], 2 * read(other)["a"])


def test_local_data_are_compared_by_content(spark: Any, store: FilesystemStore) -> None:
    import pandas as pd

    data = pd.DataFrame({"x": np.arange(10.0), "y": np.arange(10)})
    first = prepare(spark.createDataFrame(data), store, label_cols=["y"])
    data.loc[3, "x"] = 77.0
    second = prepare(spark.createDataFrame(data), store, label_cols=["y"])
    assert not second.reused
    assert 77.0 in read(second)["x"]
    data.loc[3, "x"] = 3.0
    third = prepare(spark.createDataFrame(data), store, label_cols=["y"])
    assert (third.reused, third.idx) == (True, first.idx)


def test_a_pipeline_prepares_once(spark: Any, store: FilesystemStore, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler

    df = parquet(spark, tmp_path / "source").selectExpr("*", "string(id % 3) as kind")
    assembler = VectorAssembler(inputCols=["id", "x", "hot"], outputCol="v")
    pipeline = Pipeline(
        stages=[
            StringIndexer(inputCol="kind", outputCol="number", handleInvalid="skip"),
            OneHotEncoder(inputCol="number", outputCol="hot"),
            assembler,
            StandardScaler(inputCol="v", outputCol="scaled"),
        ]
    )
    arguments: dict[str, Any] = {"feature_cols": ["scaled"], "label_cols": ["y"]}
    first = prepare(pipeline.fit(df).transform(df), store, **arguments)
    again = prepare(pipeline.fit(df).transform(df), store, **arguments)
    assert (again.reused, again.idx) == (True, first.idx)
    # Other source data: the scaler's learned values are others too.
    more = spark.read.parquet(str(tmp_path / "source")).filter("id > 3").selectExpr("*", "string(id % 3) as kind")
    assert not prepare(pipeline.fit(more).transform(df), store, **arguments).reused
    assembler.setInputCols(["x", "id", "hot"])
    assert not prepare(pipeline.fit(df).transform(df), store, **arguments).reused


def test_the_log_says_why_data_are_not_used_again(
    spark: Any, store: FilesystemStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="sparkvod")
    prepare(frame(spark), store, label_cols=["y"])
    prepare(frame(spark), store, label_cols=["y"], feature_cols=["x"])
    assert "is not used again: other columns, another validation or another seed" in caplog.text
    prepare(frame(spark).filter("id > 1"), store, label_cols=["y"])
    assert "is not used again: the plans differ" in caplog.text
    prepare(frame(spark).selectExpr("*", "rand(1) as r"), store, label_cols=["y"])
    assert "the function rand is not known" in caplog.text


def test_released_data_of_this_driver_can_be_deleted(spark: Any, store: FilesystemStore) -> None:
    used = prepare(frame(spark), store, label_cols=["y"])
    released = prepare(frame(spark, 50), store, label_cols=["y"])
    release(released)
    time.sleep(0.01)
    assert clean(store, older_than=0) == [released.idx]
    assert clean(store, older_than=0) == []
    assert open_prepared(store, used.idx).fingerprint == used.fingerprint
    assert not prepare(frame(spark, 50), store, label_cols=["y"]).reused


def test_what_is_proved(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.feature import Bucketizer
    from pyspark.ml.functions import array_to_vector, vector_to_array
    from pyspark.sql import functions as F

    df = parquet(spark, tmp_path / "source")
    text = F.col("id").cast("string")
    proved = [
        df,
        spark.range(10),
        df.withColumn("z", F.abs("x") + F.sqrt(F.col("x").cast("double"))),
        df.select("id", F.abs("x"), F.when(F.col("x") > 1, 2).otherwise(F.coalesce("x", F.lit(0.0))).alias("w")),
        df.select(F.array("x", F.lit(1.0)), F.struct("x", "y").alias("s"), F.col("x").cast("float"), -F.col("x")),
        df.select(F.upper(text), F.concat_ws("-", text, text), text.like("a%"), text.rlike("a"), F.split(text, "1")),
        df.select(F.expr("x between 1 and 2"), F.expr("x in (1, 2)"), F.expr("id div 3"), F.expr("id & 3")),
        df.select(F.transform(F.array("x"), lambda v: v + 1), F.expr("date'2020-01-01' + interval 1 day")),
        df.na.fill(0).na.drop(),
        df.groupBy("y").agg(F.sum("x").alias("total")).join(df, "y"),
        df.select("*", *[F.lit(i).alias(f"c{i}") for i in range(60)]),
        df.select(F.explode(F.array("x", "x"))),
        df.withColumn("v", vector_to_array(array_to_vector(F.array("x")))),
        Bucketizer(splits=[-1.0, 10.0, 1000.0], inputCol="x", outputCol="b").transform(df),
        spark.sql("with t as (select * from values (1, 2.0), (2, 3.0) t(a, b)) select * from t"),
    ]
    for frame_ in proved:
        assert prove(frame_) is not None, frame_.schema

    @F.udf("double")
    def abs(value: float) -> float:
        return math.fabs(value)

    cached = df.filter("id > 1").cache()
    spark.createDataFrame([(1,)], ["id"]).createOrReplaceTempView("rows_of_an_rdd")
    refused = [
        df.withColumn("z", abs("x")),
        df.withColumn("z", F.udf(lambda v: v, "double")("x")),
        df.sample(0.9, seed=1),
        df.limit(3),
        df.dropDuplicates(["y"]),
        df.selectExpr("*", "row_number() over (partition by y order by y) r"),
        cached.filter("id > 2"),
        df.selectExpr("cast(unix_timestamp() as double) as r"),
        df.selectExpr("current_date() as r"),
        df.selectExpr("uuid() as r"),
        df.selectExpr("monotonically_increasing_id() as r"),
        df.filter("id in (select id from rows_of_an_rdd)"),
        df.mapInArrow(lambda batches: batches, df.schema),
        df.select("*", *[F.lit(i).alias(f"c{i}") for i in range(60)], F.rand(1)),
    ]
    for frame_ in refused:
        assert prove(frame_) is None, frame_.schema
    cached.unpersist()


def test_damaged_data_are_prepared_again(spark: Any, store: FilesystemStore, tmp_path: Path) -> None:
    df = parquet(spark, tmp_path / "source")
    first = prepare(df, store, label_cols=["y"])
    os.unlink(os.path.join(first.train.path, first.train.files[0]))
    second = prepare(df, store, label_cols=["y"])
    assert not second.reused
    assert second.train.rows == 50


@pytest.mark.parametrize("damage", [b"", b"null", b"{", b"[1]", b'{"version": 1}', b"\xff", b'{"version": "x"}'])
def test_a_damaged_manifest_is_absent(
    store: FilesystemStore, damage: bytes, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = store.get_train_data_path()
    os.makedirs(path)
    pq.write_table(pa.table({"x": [1.0, 2.0]}), f"{path}/a.parquet")
    store.write_bytes(store.get_data_metadata_path(path), damage)
    assert open_prepared(store).train.rows == 2
    told = [record.getMessage() for record in caplog.records]
    assert told == [] if b'"x"' in damage else f"{store.get_data_metadata_path(path)} is damaged" in told[0]


def test_a_damaged_source_is_named(spark: Any, store: FilesystemStore, tmp_path: Path) -> None:
    df = parquet(spark, tmp_path / "source")
    path = next((tmp_path / "source").glob("*.parquet"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=f"cannot read the DataFrame's source file .*{path.name} .*cut off or damaged"):
        prepare(df, store, label_cols=["y"])
    assert data_sets(store) == []


@pytest.mark.parametrize("damage", ["empty", "cut off", "not Parquet"])
def test_a_damaged_file_is_named(store: FilesystemStore, damage: str) -> None:
    path = store.get_train_data_path()
    os.makedirs(path)
    pq.write_table(pa.table({"x": [1.0, 2.0]}), f"{path}/a.parquet")
    content = Path(f"{path}/a.parquet").read_bytes()
    Path(f"{path}/b.parquet").write_bytes({"empty": b"", "cut off": content[:-9], "not Parquet": b"x" * 99}[damage])
    with pytest.raises(DataError, match="b.parquet is not a readable Parquet file .* empty, cut off or damaged"):
        open_prepared(store)


def test_a_damaged_row_group_is_named(store: FilesystemStore) -> None:
    path = store.get_train_data_path()
    os.makedirs(path)
    pq.write_table(pa.table({"x": np.arange(1000.0)}), f"{path}/a.parquet", compression="zstd", use_dictionary=False)
    content = bytearray(Path(f"{path}/a.parquet").read_bytes())
    content[4:400] = bytes(396)
    Path(f"{path}/a.parquet").write_bytes(content)
    data = open_prepared(store)
    with pytest.raises(DataError, match="(?s)row group 0 of .*a.parquet cannot be read .*damaged"):
        Decoder(data.train, data.train.columns).decode(0)


# -- the store's bookkeeping --------------------------------------------------------------------------------------


def test_a_preparation_that_has_not_ended_is_not_opened(store: FilesystemStore) -> None:
    idx = claim(store)
    with pytest.raises(DataError, match="has not ended"):
        open_prepared(store, idx)


def test_files_of_repeated_tasks_are_deleted(store: FilesystemStore) -> None:
    path = store.get_train_data_path(0)
    for name in ("a.parquet", "repeated.parquet", "_claim"):
        store.write_text(f"{path}/{name}", "x")
    _clean(store, {path: [{"name": "a.parquet", "size": 1}]})
    assert sorted(store.listing(path)) == ["_claim", "a.parquet"]
    with pytest.raises(StoreError, match="a path that all machines share"):
        _clean(store, {path: [{"name": "b.parquet", "size": 1}]})


def test_ml_vectors_in_plain_parquet(spark: Any, store: FilesystemStore) -> None:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F

    df = frame(spark).select("y", array_to_vector(F.array("x")).alias("v"), F.lit(1).cast("decimal(5,2)").alias("d"))
    df.write.parquet(store.get_train_data_path())
    prepared = open_prepared(store)
    with pytest.raises(DataError, match="'v' .*as Spark writes ML vectors.*vector_to_array.*fit\\(\\) on the"):
        prepared.column("v")
    with pytest.raises(DataError, match="'d' has the type decimal.*cast it to double"):
        prepared.column("d")


def test_plain_parquet_directories(spark: Any, store: FilesystemStore) -> None:
    frame(spark).selectExpr("*", "array(x, y) as v", "'t' as s", "if(id = 0, null, id) as gap").write.parquet(
        store.get_train_data_path()
    )
    prepared = open_prepared(store)
    assert prepared.idx is None
    assert prepared.val is None
    assert {c.name: c.shape for c in prepared.schema} == {"id": (), "x": (), "y": (), "v": (2,)}
    with pytest.raises(DataError, match="'s' has the type string"):
        prepared.column("s")
    with pytest.raises(DataError, match="'gap' .* has 1 nulls"):
        prepared.column("gap")
    with open_reader("auto", prepared.train, ["id", "v"], 7) as reader:
        seen = [row for batch in reader.epoch(0) for row in batch.columns["id"]]
    assert sorted(seen) == list(range(100))
    # Metadata are not kept: another write is seen.
    frame(spark, 30).write.mode("overwrite").parquet(store.get_train_data_path())
    assert open_prepared(store).train.rows == 30
    with pytest.raises(DataError, match="no Parquet files"):
        open_prepared(store, 77)


@pytest.mark.timeout(270)
def test_spark_connect(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect's client is not installed")
    script = textwrap.dedent(
        f"""
        from importlib.util import find_spec
        from pyspark.sql import SparkSession, functions as F
        from sparkvod.data import Store, prepare
        from sparkvod.errors import DataError
        spark = SparkSession.builder.remote("local[2]").getOrCreate()
        from pyspark.ml.linalg import Vectors
        rows = [(i, float(i), Vectors.dense([i, 1.0])) for i in range(50)]
        df = spark.createDataFrame(rows, ["id", "y", "v"])
        store = Store.create({str(tmp_path / "store")!r})
        first = prepare(df, store, label_cols=["y"], validation=0.2)
        assert first.train.rows == 40 and first.val.rows == 10, first
        assert first.column("v").shape == (2,)
        assert prepare(df, store, label_cols=["y"], validation=0.2).reused
        try:
            prepare(df.filter("id < 0"), store, label_cols=["y"])
        except DataError as error:
            assert "no rows" in str(error)
        else:
            raise AssertionError
        fails = F.udf(lambda y: 1 / (y - y), "double")
        try:
            prepare(df.withColumn("x", fails("y")), store, label_cols=["y"])
        except DataError as error:
            assert "failed while fit evaluated it: ZeroDivisionError" in str(error), error
        else:
            raise AssertionError
        # Vectors of Parquet files, which Spark 4.3 cannot hand a Python function.
        df.write.parquet({str(tmp_path / "vectors")!r})
        read = spark.read.parquet({str(tmp_path / "vectors")!r})
        assert prepare(read, store, label_cols=["y"]).train.rows == 50
        if find_spec("torch"):
            import torch
            from sparkvod.estimators import TorchModel
            model = TorchModel(model=torch.nn.Flatten(0), feature_cols=["id"], label_cols=["y"])
            found = model.transform(read).collect()
            assert sorted(row["y__output"] for row in found) == list(range(50)), found
            assert all(row["v"].toArray().tolist() == [row["id"], 1.0] for row in found)
        print("fine")
        spark.stop()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
        capture_output=True,
        text=True,
        timeout=260,
        check=False,
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-3000:]


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    _entries.clear()
