"""``KerasModel.transform`` of an MLP and a small CNN, beside other ways to predict the rows of the same DataFrame.

All of them read the same Parquet files through the same Spark session, which has two slots, in Python workers of one
thread that keep their model loaded, and return a DataFrame with all the columns there were and the predictions:

* ``transform``;
* a loop of ``model.predict`` over the Arrow batches of ``mapInArrow``, an array of 10,000 rows at a time as Spark cuts
  them, by Keras's own batches of :data:`PREDICT_BATCH` rows, of the powers of two the fastest for it;
* row by row: a Python UDF that calls ``model.predict_on_batch(row)``, of Keras's ways the fastest for one row.

The loop over ``mapInArrow`` that leaves out the columns there were is measured too: with 784 numbers in a row,
carrying them costs as much as a small model. So is the loop of ``model.predict`` in two processes without Spark, over
arrays that are in their memory already, which shows what reading and handing over cost all of them. Beside these
nothing is promised.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import MIN_ROUNDS, Report, alternate
from benchmarks.keras import CASES, network
from benchmarks.run import RANKS, session

BY_ROW, OF_LOOP = 20.0, 0.8  # promised
WIDTH, FILES = 784, 4
ROWS = {"MLP": 80_000, "CNN": 40_000}
ROWS_ALONE = 200  # row by row: as many take about as long
PREDICT_BATCH = {"MLP": 1024, "CNN": 128}
OURS, LOOP, ALONE = "transform", "model.predict in mapInArrow", "predict_on_batch(row) in a UDF"
LEAN = "model.predict in mapInArrow, predictions alone"
BARE = "model.predict, arrays, no Spark"

_models: dict[str, Any] = {}


def write(path: Path, rows: int) -> None:
    """Writes ``x``, 784 numbers of 256 grey values, ``digit``, and ``row`` as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.arange(rows), FILES)):
        x = np.random.default_rng(number).integers(0, 256, (len(part), WIDTH)).astype("float32") / 255
        offsets = np.arange(0, x.size + 1, WIDTH, dtype="int32")
        columns = {"x": pa.ListArray.from_arrays(pa.array(offsets), pa.array(x.ravel())), "row": pa.array(part)}
        columns["digit"] = pa.array((part % 10).astype("int32"))
        pq.write_table(pa.table(columns), path / f"part-{number}.parquet")


def loaded(path: str) -> Any:
    """Returns the model of a ``.keras`` file, which the worker keeps, with TensorFlow on one thread."""
    if path not in _models:
        import keras
        import tensorflow as tf

        if tf.config.threading.get_intra_op_parallelism_threads() != 1:
            tf.config.threading.set_intra_op_parallelism_threads(1)
        _models[path] = keras.models.load_model(path)
    return _models[path]


def predict_loop(path: str, shape: tuple[int, ...], size: int, keeps: bool) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns the loop of ``model.predict`` over Arrow batches, whose columns it may keep, ``size`` rows at a time."""
    import pyarrow as pa

    def loop(batches: Iterator[Any]) -> Iterator[Any]:
        from benchmarks import keras_transform

        model = keras_transform.loaded(path)
        for batch in batches:
            x = batch.column("x").flatten().to_numpy().reshape(-1, *shape)
            out = model.predict(x, batch_size=size, verbose=0)
            offsets = pa.array(np.arange(0, out.size + 1, out.shape[1], dtype="int32"))
            values = pa.ListArray.from_arrays(offsets, pa.array(out.ravel()))
            kept = batch.columns if keeps else [batch.column("row")]
            names = batch.schema.names if keeps else ["row"]
            yield pa.RecordBatch.from_arrays([*kept, values], [*names, "out"])

    return loop


def row_by_row(path: str, shape: tuple[int, ...]) -> Callable[[Any], list[float]]:
    """Returns the function of one row."""

    def one(x: Any) -> list[float]:
        from benchmarks import keras_transform

        row = np.array(x, "float32").reshape(1, *shape)
        found: list[float] = keras_transform.loaded(path).predict_on_batch(row)[0].tolist()
        return found

    return one


def bare(path: str, shape: tuple[int, ...], size: int, rows: int, rounds: int) -> list[float]:
    """Returns seconds that one of two processes needs for its half of the rows, all in its memory."""
    import sparkvod.keras as hvd

    model = loaded(path)
    hvd.init()
    x = np.random.default_rng(0).random((rows // RANKS, *shape), "float32")
    found = []
    for _ in range(rounds + 1):  # the first one traces
        hvd.barrier()
        began = time.perf_counter()
        model.predict(x, batch_size=size, verbose=0)
        found.append(time.perf_counter() - began)
    return found[1:]


def fitted(spark: Any, name: str, path: Path) -> Any:
    """Returns a model that a KerasEstimator has fitted to some of the rows."""
    from sparkvod.estimators import KerasEstimator

    with tempfile.TemporaryDirectory() as store:
        return KerasEstimator(
            model=network(name),
            optimizer="sgd",
            loss="sparse_categorical_crossentropy",
            feature_cols=["x"],
            label_cols=["digit"],
            num_proc=RANKS,  # so that TensorFlow has one thread in the workers
            store=store,
            random_seed=1,
            verbose=0,
        ).fit(spark.read.parquet(str(path)).where("row < 256"))


def subjects(spark: Any, name: str, model: Any, path: str, df: Any) -> dict[str, Any]:
    """Returns DataFrames of ``row`` and ``out``, the predictions, by who makes them; only few rows for the slow one."""
    from pyspark.sql import functions as F

    shape, size, columns = CASES[name][0], PREDICT_BATCH[name], "x array<float>, row long, digit int"
    one = F.udf(row_by_row(path, shape), "array<float>")
    few = spark.createDataFrame(df.where(f"row % {ROWS[name] // ROWS_ALONE} = 0").toArrow()).repartition(RANKS).cache()
    few.count()
    return {
        OURS: model.transform(df).withColumnRenamed("digit__output", "out"),
        LOOP: df.mapInArrow(predict_loop(path, shape, size, True), f"{columns}, out array<float>"),
        LEAN: df.mapInArrow(predict_loop(path, shape, size, False), "row long, out array<float>"),
        ALONE: few.withColumn("out", one("x")),
    }


def verify(found: dict[str, Any], model: Any, df: Any, name: str) -> None:
    """Compares the predictions of some rows with those of the model itself."""
    some = f"row % {ROWS[name] // ROWS_ALONE} = 0"
    table = df.where(some).toPandas().sort_values("row")
    x = np.stack(table["x"].to_list()).reshape(-1, *CASES[name][0])
    expected = model.getModel().predict(x, verbose=0)
    for who, frame in found.items():
        got = frame.where(some).select("row", "out").toPandas().sort_values("row")
        if got["row"].to_list() != table["row"].to_list():
            raise AssertionError(f"{name}: {who} returned other rows")
        out = np.stack([np.asarray(value) for value in got["out"]])
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4, err_msg=f"{name}, {who}")


def case(report: Report, spark: Any, name: str, folder: Path) -> None:
    """Verifies and measures one model."""
    import sparkvod

    write(folder / name, ROWS[name])
    df = spark.read.parquet(str(folder / name)).select("x", "row", "digit")
    model, file = fitted(spark, name, folder / name), str(folder / f"{name}.keras")
    model.getModel().save(file)
    found = subjects(spark, name, model, file, df)
    verify(found, model, df, name)

    def timed(who: str) -> float:
        began = time.perf_counter()
        found[who].write.format("noop").mode("overwrite").save()
        return (ROWS_ALONE if who == ALONE else ROWS[name]) / (time.perf_counter() - began)

    for who in found:
        timed(who)
    rounds = MIN_ROUNDS if report.quick else 11
    values = alternate({who: (lambda who=who: timed(who)) for who in found}, rounds)
    what = f"predict {ROWS[name]:,} rows of {WIDTH}, {name}, {RANKS} Spark workers"
    report.add(what, values, "rows/s")
    report.require(f"{name}, transform times as fast as row by row", report.ratio(what, OURS, ALONE), at_least=BY_ROW)
    report.require(f"{name}, transform beside model.predict", report.ratio(what, OURS, LOOP), at_least=OF_LOOP)
    env = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    arguments = (file, CASES[name][0], PREDICT_BATCH[name], ROWS[name], MIN_ROUNDS)
    seconds = sparkvod.run_local(bare, arguments, np=RANKS, env=env, verbose=0, timeout=300)
    report.add(what, {BARE: [ROWS[name] / max(both) for both in zip(*seconds, strict=True)]}, "rows/s")


def measure(report: Report) -> None:
    """Measures rows per second of all."""
    spark = session()
    try:
        with tempfile.TemporaryDirectory(prefix="sparkvod-bench-") as folder:
            for name in CASES:
                case(report, spark, name, Path(folder))
    finally:
        spark.stop()
