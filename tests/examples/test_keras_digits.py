"""The digits of the Keras example are told apart."""

from __future__ import annotations

from typing import Any

import pytest

keras = pytest.importorskip("keras", reason="the example trains with Keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")
pytest.importorskip("sklearn", reason="the example needs scikit-learn's digits")

import keras_digits  # noqa: E402


@pytest.mark.timeout(180)
def test_it_tells_97_of_100_digits(spark: Any) -> None:
    df = keras_digits.to_spark(spark)
    model = keras_digits.train(df, num_proc=2, verbose=0)
    accuracy = keras_digits.accuracy(model, df)
    assert accuracy >= 0.97
    assert model.getHistory()[-1]["validation"]["accuracy"] == pytest.approx(accuracy, abs=1e-6)
