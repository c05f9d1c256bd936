"""What a model's ``transform`` makes of columns: types, names, nulls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.functions import array_to_vector, vector_to_array

from sparkvod.errors import DataError
from sparkvod.estimators import TorchEstimator, TorchModel, model, predictor
from sparkvod.estimators.columns import OutputSpec
from sparkvod.estimators.model import output_of
from tests.estimators.backends import Here

torch = pytest.importorskip("torch", reason="the model here is PyTorch's")

VECTOR = '{"type":"udt","class":"org.apache.spark.ml.linalg.VectorUDT"}'


class Known(torch.nn.Module):
    """Outputs whose values are plain: the sum of the inputs, and the inputs times two."""

    def forward(self, x: Any) -> Any:
        return x.sum(1, keepdim=True), 2 * x


def fitted(shape: int | None = None, dtype: str = "float32", **params: Any) -> TorchModel:
    feature = {"dtype": "float64", "shape": [], "spark_type": '"double"'}
    names = ["a", "b"] if shape is None else ["v"]
    if shape is not None:
        feature = {"dtype": "float64", "shape": [shape], "spark_type": VECTOR}
    metadata = {
        "columns": dict.fromkeys(names, feature),
        "inputs": [{"columns": names, "tail": [2], "dtype": dtype}],
        "outputs": [{"tail": [1], "dtype": dtype}, {"tail": [2], "dtype": dtype}],
    }
    return TorchModel(model=Known(), feature_columns=names, label_columns=["y", "z"], _metadata=metadata, **params)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return spark.range(0, 10, 1, 3).selectExpr("id", "id + 0.25D as a", "float(-id) as b", "'text' as t")


@pytest.mark.parametrize(
    ("dtype", "tail", "expected"),
    [
        ("float32", (), ("float32", False)),
        ("bfloat16", (1,), ("float32", False)),
        ("float64", (1,), ("float64", False)),
        ("int64", (1, 1), ("float64", False)),
        ("bool", (), ("float64", False)),
        ("float32", (3,), ("float64", True)),
        ("float64", (2, 2), ("float64", True)),
    ],
)
def test_the_columns_type_follows_from_the_output(dtype: str, tail: tuple[int, ...], expected: tuple[Any, ...]) -> None:
    output = output_of("o", OutputSpec(tail, dtype))
    assert (output.dtype, output.is_vector) == expected


def test_outputs_are_floats_doubles_and_vectors(df: Any) -> None:
    for dtype, kind in (("float32", "float"), ("float64", "double")):
        found = fitted(dtype=dtype).transform(df)
        assert [field.dataType.simpleString() for field in found.schema.fields] == [
            *["bigint", "double", "float", "string"],
            *[kind, "vector"],
        ]
        for row in found.collect():
            assert row["y__output"] == row["a"] + row["b"] == 0.25
            np.testing.assert_array_equal(row["z__output"].toArray(), [2 * row["a"], 2 * row["b"]])


def test_vectors_dense_and_sparse_go_in(spark: Any) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(Vectors.dense(1.0, 2.0),), (Vectors.sparse(2, [1], [5.0]),)]
    df = spark.createDataFrame(rows, ["v"])
    found = fitted(shape=2).transform(df).collect()
    assert [row["y__output"] for row in found] == [3.0, 5.0]
    assert [row["v"] for row in found] == [row[0] for row in rows]


def test_output_columns_have_names_of_their_own(df: Any) -> None:
    named = fitted(outputCols=["p", "q"])
    assert named.transform(df).columns[-2:] == ["p", "q"]
    with pytest.raises(DataError, match="already has the output columns t: call setOutputCols"):
        named.setOutputCols(["p", "t"]).transform(df)
    with pytest.raises(ValueError, match="one name per label"):
        named.setOutputCols(["p"]).transform(df)


def test_names_that_differ_in_case_only(df: Any) -> None:
    spark = df.sparkSession
    with pytest.raises(DataError, match="already has the output columns Y__OUTPUT"):
        fitted().transform(df.withColumn("Y__OUTPUT", df["a"]))
    with pytest.raises(DataError, match="output columns p, P must have different names"):
        fitted(outputCols=["p", "P"]).transform(df)
    twice = df.selectExpr("a", "a as A", "b")
    with pytest.raises(DataError, match="more than one feature column a was found.*it has a, A, b: rename"):
        fitted().transform(twice)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert fitted(outputCols=["p", "P"]).transform(twice).columns == ["a", "A", "b", "p", "P"]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_whole_numbers_are_doubles_and_none_is_rounded() -> None:
    output = predictor.Output("o", (), "float64", False)
    assert output.to_arrow(np.array([2**53, -5]), 2).to_pylist() == [2.0**53, -5.0]
    assert output.to_arrow(np.array([True, False]), 2).to_pylist() == [1.0, 0.0]
    with pytest.raises(DataError, match=f"output column 'o' cannot hold the whole number {2**53 + 1} exactly"):
        output.to_arrow(np.array([0, 2**53 + 1]), 2)


def test_features_that_are_not_there_or_of_another_kind(df: Any) -> None:
    with pytest.raises(DataError, match="without the feature columns b was found; it has id, a, t"):
        fitted().transform(df.drop("b"))
    with pytest.raises(DataError, match="feature column 'v' must be a vector or an array of 2 .*got type double"):
        fitted(shape=2).transform(df.selectExpr("a as v"))
    with pytest.raises(DataError, match="column 'b' has the type date, which cannot become a tensor.*dayofyear"):
        fitted().transform(df.selectExpr("a", "date'2020-01-01' as b"))
    with pytest.raises(DataError, match="column 'b' has the type string, which cannot become a tensor"):
        fitted().transform(df.selectExpr("a", "string(b) as b"))
    with pytest.raises(DataError, match="feature column 'b' must be a number, as in training, got type array<float>"):
        fitted().transform(df.selectExpr("a", "array(b) as b"))
    assert fitted().transform(df.selectExpr("a", "id as b")).first()["y__output"] == 0.25


def test_nulls_and_other_lengths_are_errors(df: Any) -> None:
    with pytest.raises(Exception, match=r"feature column 'b' has 1 nulls among \d+ rows"):
        fitted().transform(df.selectExpr("a", "if(id = 7, null, b) as b")).collect()
    vectors = df.selectExpr("if(id = 7, array(a), array(a, a)) as v")
    with pytest.raises(Exception, match=r"feature column 'v' with lists of length .*length 2 was expected"):
        fitted(shape=2).transform(vectors).collect()
    with pytest.raises(Exception, match="feature column 'v' has 1 nulls"):
        fitted(shape=2).transform(df.selectExpr("if(id = 7, null, array(a, a)) as v")).collect()


def test_before_spark_4_1_it_predicts_through_pandas(df: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fitted().transform(df).collect()
    monkeypatch.delattr(model.F, "arrow_udf", raising=False)
    assert fitted().transform(df).collect() == expected
    vectors = df.select(array_to_vector(model.F.expr("array(a, double(b))")).alias("v"))
    assert [row["y__output"] for row in fitted(shape=2).transform(vectors).collect()] == [0.25] * 10


def test_the_model_is_loaded_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(predictor.Predictor):
        loads = 0

        def load(self, content: bytes) -> Any:
            Counted.loads += 1
            return lambda columns, rows: [columns["a"]]

    output = predictor.Output("o", (), "float64", False)
    for key in ["one", "one", "two", "one"]:
        made = Counted(key, b"content", (), (output,), {"a": 0})
        assert made.predict([pa.array([1.0, 2.0])])[0].to_pylist() == [1.0, 2.0]
    assert Counted.loads == 2
    wrong = Counted("two", b"content", (), (output, output), {"a": 0})
    with pytest.raises(DataError, match="returned 1 outputs, 2 were expected"):
        wrong.predict([pa.array([1.0])])


def test_it_changes_as_its_model_is_changed(df: Any) -> None:
    changing = fitted()
    changing.transform(df)
    changing.setModel(torch.nn.Sequential(Known(), Swapped()))
    assert changing.transform(df).first()["y__output"] == 1000.25


class Swapped(torch.nn.Module):
    def forward(self, outputs: Any) -> Any:
        return outputs[0] + 1000, outputs[1]


def test_accessors_of_the_peer() -> None:
    made = fitted(run_id="r", history=[{"epoch": 0}])
    assert (made.getRunId(), made.getHistory(), made.getFeatureColumns()) == ("r", [{"epoch": 0}], ["a", "b"])
    assert made.setLabelColoumns(["u", "v"]).getLabelColumns() == ["u", "v"]
    assert isinstance(made.getModel(), Known)
    assert made.getOptimizer() is None


# ---- vectors that are read from files --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Parquet file with an ML vector, a number, and text that is not valid UTF-8."""
    from pyspark.ml.feature import VectorAssembler

    path = str(tmp_path_factory.mktemp("stored") / "vectors")
    rows = spark.range(6).selectExpr(
        "id", "double(id) as a", "double(-2 * id) as b", "string(if(id = 5, unhex('ff41'), unhex('41'))) as t"
    )
    VectorAssembler(inputCols=["a", "b"], outputCol="v").transform(rows).write.parquet(path)
    return path


def test_vectors_of_files_are_read_beside_predictions(spark: Any, stored: str, tmp_path: Any) -> None:
    """Spark 4.3 hands a function the scan's batches, and cannot convert the vectors in them (UNSUPPORTED_DATATYPE)."""
    read = spark.read.parquet(stored)
    frames = {
        "a vector in": (fitted(shape=2), read),
        "numbers in, a vector beside": (fitted(), read),
        "a vector that was converted before": (fitted(), read.withColumn("v", vector_to_array("v"))),
        "a vector in a struct": (fitted(), read.selectExpr("id", "a", "b", "struct(v) as s")),
    }
    for number, (made, frame) in enumerate(frames.values()):
        found = made.transform(frame)
        found.write.parquet(str(tmp_path / str(number)))
        for row in spark.read.parquet(str(tmp_path / str(number))).collect():
            assert row["y__output"] == -row["id"]
            np.testing.assert_array_equal(row["z__output"].toArray(), [2 * row["a"], 2 * row["b"]])
    assert sorted(fitted().transform(read.drop("t")).toPandas()["y__output"]) == [-5, -4, -3, -2, -1, 0]
    filtered = fitted(shape=2).transform(read).where("a > 3")
    assert filtered.count() == 2
    assert "GreaterThan(a,3.0)" in filtered._jdf.queryExecution().executedPlan().toString()  # other filters pass


def test_probabilities_of_whole_labels_by_vectors_of_files(spark: Any, stored: str, tmp_path: Any) -> None:
    """A sigmoid's column keeps its numbers whatever the label's type is: an evaluator ranks rows by them."""
    df = spark.read.parquet(stored).selectExpr("v", "int(id % 2) as k")
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid())
    trained = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.BCELoss(),
        feature_cols=["v"],
        label_cols=["k"],
        backend=Here(),
        store=str(tmp_path / "store"),
        verbose=0,
    ).fit(df)
    found = trained.transform(df)
    assert found.schema["k__output"].dataType.simpleString() == "float"
    table = found.toPandas()
    inputs = torch.tensor(np.stack([v.toArray() for v in table["v"]]), dtype=torch.float32)
    expected = trained.getModel()(inputs).detach().numpy()[:, 0]
    assert ((expected > 0) & (expected < 1)).all()
    np.testing.assert_allclose(table["k__output"], expected, rtol=1e-5)
    above = np.subtract.outer(expected[table["k"] == 1], expected[table["k"] == 0])
    evaluator = BinaryClassificationEvaluator(rawPredictionCol="k__output", labelCol="k")
    doubles = found.withColumn("k__output", found["k__output"].cast("double"))  # the evaluator takes no floats
    assert evaluator.evaluate(doubles) == pytest.approx(((above > 0) + 0.5 * (above == 0)).mean())


def test_vectors_of_files_in_a_stream(spark: Any, stored: str, tmp_path: Any) -> None:
    stream = spark.readStream.schema(spark.read.parquet(stored).schema).parquet(stored)
    query = (
        fitted(shape=2)
        .transform(stream)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(60)
    found = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(row["y__output"] for row in found) == [-5, -4, -3, -2, -1, 0]
    assert all(row["v"].toArray().tolist() == [row["a"], row["b"]] for row in found)


# ---- models that were trained elsewhere ------------------------------------------------------------------------------


class IdsFromOne(torch.nn.Module):
    """Zeros are no valid input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(torch.arange(12.0, dtype=torch.float64).reshape(12, 1))

    def forward(self, ids: Any) -> Any:
        return self.table(ids.squeeze(1) - 1)


def test_a_model_that_was_trained_elsewhere(spark: Any, df: Any, stored: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout())
    torch.nn.init.ones_(net[0].weight)
    torch.nn.init.zeros_(net[0].bias)
    net[0].eval()
    made = TorchModel(model=net, feature_columns=["a", "b"], label_columns=["y"])
    found = made.transform(df)
    assert found.schema["y__output"].dataType.simpleString() == "float"
    assert [row["y__output"] for row in found.collect()] == [0.25] * 10
    assert (net.training, net[0].training) == (True, False)
    vectors = TorchModel(model=Known(), feature_cols=["v"], label_cols=["y", "z"]).transform(spark.read.parquet(stored))
    assert {row["y__output"] for row in vectors.collect()} == {0, -1, -2, -3, -4, -5}
    ids = TorchModel(model=IdsFromOne(), feature_cols=["n"], outputCols=["row"], input_dtypes=["int64"])
    found = ids.transform(spark.range(1, 5).selectExpr("if(id = 1, null, id) as n").dropna())
    assert (found.schema["row"].dataType.simpleString(), found.count()) == ("double", 3)
    assert sorted(row["row"] for row in found.collect()) == [1, 2, 3]


def test_a_model_that_was_trained_elsewhere_and_does_not_fit(df: Any) -> None:
    net, arrays = torch.nn.Linear(2, 1), df.selectExpr("array(a, b) as v")
    refusals: list[tuple[dict[str, Any], Any, str]] = [
        ({}, df, "model is required"),
        ({"model": torch.nn.Flatten, "feature_cols": ["a"]}, df, r"got 'Flatten', .* pass model=Flatten\(...\)"),
        ({"model": net}, df, "feature_columns is required"),
        ({"model": net, "feature_cols": ["a"]}, df, "label_columns is required"),
        ({"model": net, "feature_cols": ["a"], "label_cols": ["y"]}, df, "the model cannot take its 1 input"),
        (
            {"model": net, "feature_cols": ["v"], "label_cols": ["y"]},
            arrays,
            "length of feature column 'v'.*input_shapes",
        ),
        ({"model": Known(), "feature_cols": ["a", "b"], "label_cols": ["y"]}, df, "makes 2 outputs.*name 1"),
    ]
    for params, frame, message in refusals:
        with pytest.raises(ValueError, match=message):
            TorchModel(**params).transform(frame)
    with pytest.raises(TypeError, match="feature_columns and feature_cols are the same Param"):
        TorchModel(feature_cols=["a"], feature_columns=["a"])
    shaped = TorchModel(model=net, feature_cols=["v"], label_cols=["y"], input_shapes=[[-1, 2]])
    assert shaped.transform(arrays).count() == 10


def test_text_that_is_null_or_not_utf8() -> None:
    with pytest.raises(DataError, match="column 't' has text that is not valid UTF-8, such as b'\\\\xffA'.*decode"):
        predictor.to_numpy(pa.array([b"A", b"\xffA"]).cast(pa.string(), safe=False), "t", 0)
    with pytest.raises(DataError, match="feature column 't' has 1 nulls.*df.fillna"):
        predictor.to_numpy(pa.array(["A", None]), "t", 0)
