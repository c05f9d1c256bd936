"""What a model's ``transform`` makes of columns: types, names, nulls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.functions import array_to_vector

from sparkvod.errors import DataError
from sparkvod.estimators import TorchModel, model, predictor
from sparkvod.estimators.model import output_of

torch = pytest.importorskip("torch", reason="the model here is PyTorch's")

ARRAY = '{"containsNull":true,"elementType":"float","type":"array"}'
VECTOR = '{"type":"udt","class":"org.apache.spark.ml.linalg.VectorUDT"}'


class Known(torch.nn.Module):
    """Outputs whose values are plain: the sum of the inputs, and the inputs times two."""

    def forward(self, x: Any) -> Any:
        return x.sum(1, keepdim=True), 2 * x


def fitted(second: str = '"double"', first: str = '"double"', shape: int | None = None, **params: Any) -> TorchModel:
    feature = {"dtype": "float64", "shape": [], "spark_type": '"double"'}
    names = ["a", "b"] if shape is None else ["v"]
    if shape is not None:
        feature = {"dtype": "float64", "shape": [shape], "spark_type": VECTOR}
    labels = {
        name: {"dtype": "float64", "shape": [], "spark_type": kind} for name, kind in (("y", first), ("z", second))
    }
    metadata = {
        "columns": {**dict.fromkeys(names, feature), **labels},
        "inputs": [{"columns": names, "tail": [2], "dtype": "float32"}],
        "outputs": [[1], [2]],
    }
    return TorchModel(model=Known(), feature_columns=names, label_columns=["y", "z"], _metadata=metadata, **params)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return spark.range(0, 10, 1, 3).selectExpr("id", "id + 0.25D as a", "float(-id) as b", "'text' as t")


@pytest.mark.parametrize(
    ("kind", "tail", "expected"),
    [
        ('"double"', (), ("float64", False, False)),
        ('"float"', (1,), ("float32", False, False)),
        ('"integer"', (1,), ("int32", False, False)),
        ('"boolean"', (1,), ("float64", False, False)),
        ('"integer"', (3,), ("float64", True, True)),
        (ARRAY, (3,), ("float32", True, False)),
        (ARRAY, (1,), ("float32", True, False)),
        (VECTOR, (2, 2), ("float64", True, True)),
    ],
)
def test_the_columns_kind_follows_the_label(kind: str, tail: tuple[int, ...], expected: tuple[Any, ...]) -> None:
    output = output_of("o", kind, tail)
    assert (output.dtype, output.is_list, output.is_vector) == expected


def test_outputs_are_scalars_vectors_and_arrays(df: Any) -> None:
    found = fitted(first='"long"', second=VECTOR).transform(df)
    assert [field.dataType.simpleString() for field in found.schema.fields] == [
        *["bigint", "double", "float", "string"],
        *["bigint", "vector"],
    ]
    for row in found.collect():
        assert row["y__output"] == round(row["id"] * 0 + 0.25)
        np.testing.assert_array_equal(row["z__output"].toArray(), [2 * row["a"], 2 * row["b"]])
    found = fitted(second=ARRAY).transform(df).first()
    assert (found["y__output"], found["z__output"]) == (0.25, [0.5, 0.0])


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
    with pytest.raises(DataError, match="already has t was found.*call setOutputCols"):
        named.setOutputCols(["p", "t"]).transform(df)
    with pytest.raises(ValueError, match="one name per label"):
        named.setOutputCols(["p"]).transform(df)


def test_names_that_differ_in_case_only(df: Any) -> None:
    spark = df.sparkSession
    with pytest.raises(DataError, match="already has Y__OUTPUT was found"):
        fitted().transform(df.withColumn("Y__OUTPUT", df["a"]))
    with pytest.raises(DataError, match="columns p, P were to be made"):
        fitted(outputCols=["p", "P"]).transform(df)
    twice = df.selectExpr("a", "a as A", "b")
    with pytest.raises(DataError, match="more than one feature column a was found.*it has a, A, b: rename"):
        fitted().transform(twice)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        assert fitted(outputCols=["p", "P"]).transform(twice).columns == ["a", "A", "b", "p", "P"]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.parametrize(
    ("values", "narrow", "wide"),
    [
        (np.array([1.5, np.nan, 300, -300], "f4"), [2, None, 127, -128], [2, None, 300, -300]),
        (np.array([1e30, -np.inf, 2.5], "f8"), [127, -128, 2], [2**63 - 1, -(2**63), 2]),
        (np.array([2**53 + 1, -5], "i8"), [127, -5], [2**53 + 1, -5]),
        (np.array([True, False]), [1, 0], [1, 0]),
    ],
)
def test_whole_numbers_never_wrap_around(values: Any, narrow: list[Any], wide: list[Any]) -> None:
    for dtype, expected in (("int8", narrow), ("int64", wide)):
        assert predictor.Output("o", (), dtype, False, False).to_arrow(values, len(values)).to_pylist() == expected
    lists = predictor.Output("o", (len(values),), "int8", True, False).to_arrow(values, 1)
    assert lists.to_pylist() == [narrow]


def test_features_that_are_not_there_or_of_another_kind(df: Any) -> None:
    with pytest.raises(DataError, match="without the feature columns b was found; it has id, a, t"):
        fitted().transform(df.drop("b"))
    with pytest.raises(DataError, match="feature column 'v' of type double was found, a vector or an array of 2"):
        fitted(shape=2).transform(df.selectExpr("a as v"))
    with pytest.raises(DataError, match="column 'b' has the type date, which cannot become a tensor.*dayofyear"):
        fitted().transform(df.selectExpr("a", "date'2020-01-01' as b"))
    with pytest.raises(DataError, match="column 'b' has the type string, which cannot become a tensor"):
        fitted().transform(df.selectExpr("a", "string(b) as b"))
    with pytest.raises(DataError, match="feature column 'b' of type array<float> was found, a number was expected"):
        fitted().transform(df.selectExpr("a", "array(b) as b"))
    assert fitted().transform(df.selectExpr("a", "id as b")).first()["y__output"] == 0.25


def test_nulls_and_other_lengths_are_errors(df: Any) -> None:
    with pytest.raises(Exception, match=r"feature column 'b' with 1 nulls among \d+ rows was found"):
        fitted().transform(df.selectExpr("a", "if(id = 7, null, b) as b")).collect()
    vectors = df.selectExpr("if(id = 7, array(a), array(a, a)) as v")
    with pytest.raises(Exception, match=r"feature column 'v' with lists of length .*length 2 was expected"):
        fitted(shape=2).transform(vectors).collect()
    with pytest.raises(Exception, match="feature column 'v' with 1 nulls"):
        fitted(shape=2).transform(df.selectExpr("if(id = 7, null, array(a, a)) as v")).collect()


def test_before_spark_4_1_it_predicts_through_pandas(df: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fitted(second=VECTOR).transform(df).collect()
    monkeypatch.delattr(model.F, "arrow_udf", raising=False)
    assert fitted(second=VECTOR).transform(df).collect() == expected
    vectors = df.select(array_to_vector(model.F.expr("array(a, double(b))")).alias("v"))
    assert [row["y__output"] for row in fitted(shape=2).transform(vectors).collect()] == [0.25] * 10


def test_the_model_is_loaded_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(predictor.Predictor):
        loads = 0

        def load(self, content: bytes) -> Any:
            Counted.loads += 1
            return lambda columns, rows: [columns["a"]]

    output = predictor.Output("o", (), "float64", False, False)
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
