"""Columns of text, for models that look words up themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import DataError
from tests.estimators.backends import Here

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import KerasEstimator  # noqa: E402

layers = keras.layers
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has tensors of text")
WORDS = ["good", "bad", "fair", "très bien", "meh"]


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    rows = [
        (f"{WORDS[i % 5]} thing {WORDS[i % 3]}", "abc"[i % 3], float(i % 11), float(i % 5 + 10 * (i % 3) + i % 11))
        for i in range(300)
    ]
    return spark.createDataFrame(rows, "title string, kind string, size double, y double").repartition(3)


def model_of(rows: Any) -> Any:
    keras.utils.set_random_seed(2)
    title, kind = keras.Input((1,), dtype="string", name="title"), keras.Input((1,), dtype="string", name="kind")
    size = keras.Input((1,), name="size")
    words = layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    words.adapt(np.array(rows["title"]))
    kinds = layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")
    scale = layers.Normalization(axis=None)
    scale.adapt(np.array(rows["size"]))
    found = layers.Flatten()(layers.Embedding(20, 4)(words(title)))
    together = layers.Concatenate()([found, kinds(kind), scale(size)])
    return keras.Model([title, kind, size], layers.Dense(1)(layers.Dense(16, activation="relu")(together)))


@pytest.mark.timeout(120)
def test_words_are_looked_up_where_the_model_is(spark: Any, df: Any, tmp_path: Path) -> None:
    table = df.toPandas()
    estimator = KerasEstimator(
        model=model_of(table),
        optimizer=keras.optimizers.Adam(0.03),
        loss="mse",
        feature_cols=["kind", "title", "size"],
        label_cols=["y"],
        validation=0.2,
        batch_size=32,
        epochs=30,
        backend=Here(),
        store=str(tmp_path / "store"),
        random_seed=1,
        verbose=0,
    )
    fitted = estimator.fit(df)
    losses = [record["validation"]["loss"] for record in fitted.getHistory()]
    assert losses[-1] < 0.05 * losses[0]
    found = fitted.transform(df).toPandas()
    inputs = [np.array(found[name]).reshape(-1, 1) for name in ("title", "kind", "size")]
    expected = fitted.getModel().predict(
        [keras.ops.convert_to_tensor(inputs[0]), keras.ops.convert_to_tensor(inputs[1]), inputs[2]], verbose=0
    )
    np.testing.assert_allclose(found["y__output"], expected[:, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match="'kind' must be text, as in training, got type double"):
        fitted.transform(df.withColumn("kind", df["size"]))


def test_text_is_refused_where_nothing_looks_it_up(df: Any, tmp_path: Path) -> None:
    plain = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    options = {"optimizer": "sgd", "loss": "mse", "backend": Here(), "store": str(tmp_path / "s"), "verbose": 0}
    with pytest.raises(DataError, match="'kind' has the type string, .*Input has dtype='string'"):
        KerasEstimator(model=plain, feature_cols=["kind", "size"], label_cols=["y"], **options).fit(df)
    looks = model_of(df.toPandas())
    names = ["title", "size", "kind"]
    with pytest.raises(DataError, match="'kind' has the type string"):
        KerasEstimator(model=looks, feature_cols=names, label_cols=["kind"], **options).fit(df)
    mixed = df.withColumnRenamed("size", "other")
    with pytest.raises(DataError, match="column 'other' with numbers was found for an input of dtype string"):
        KerasEstimator(model=looks, feature_cols=["title", "other", "kind"], label_cols=["y"], **options).fit(mixed)
