"""A convolutional network on scikit-learn's handwritten digits, trained by Keras on a Spark DataFrame.

    python examples/keras_digits.py                     # local Spark, two ranks
    python examples/keras_digits.py --num-proc 4 --epochs 20

The images come as a column of 64 numbers; preprocessing is a layer of the model, so it goes wherever the model goes.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812, as everybody calls it

from sparkvod.estimators import KerasEstimator, KerasModel


def to_spark(spark: SparkSession) -> DataFrame:
    """Returns all 1,797 digits: ``pixels``, 64 numbers from 0 to 16, ``digit``, ``held_out``, true for every sixth."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = [
        (number, image.ravel().tolist(), int(digit), number % 6 == 0)
        for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True))
    ]
    return spark.createDataFrame(rows, "id int, pixels array<float>, digit int, held_out boolean").repartition(4, "id")


def make_model() -> keras.Model:
    """Returns a network for 64 numbers per row that gives ten probabilities."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Rescaling(1 / 16),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )


def train(df: DataFrame, num_proc: int = 2, epochs: int = 10, verbose: int = 1) -> KerasModel:
    """Returns the model, fitted to the rows that are not held out.

    Args:
        df: what :func:`to_spark` returns.
        num_proc: number of ranks.
        epochs: how often all rows are shown.
        verbose: 0: silent.
    """
    keras.utils.set_random_seed(1)
    estimator = KerasEstimator(
        model=make_model(),
        optimizer=keras.optimizers.Adam(0.003),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        feature_cols=["pixels"],
        label_cols=["digit"],
        validation="held_out",
        batch_size=64 // num_proc,
        epochs=epochs,
        num_proc=num_proc,
        random_seed=1,
        verbose=verbose,
    )
    return estimator.fit(df)


def accuracy(model: KerasModel, df: DataFrame) -> float:
    """Returns the share of the held-out digits that are told right, by ``transform``."""
    scores = vector_to_array("digit__output")
    told = F.array_position(scores, F.array_max(scores)) - 1
    found: Any = model.transform(df.where("held_out")).agg(F.avg((told == F.col("digit")).cast("double"))).first()
    return float(found[0])


def main() -> None:
    """Reads the command line, trains and tells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-proc", type=int, default=2, help="number of ranks")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    spark = SparkSession.builder.master(f"local[{arguments.num_proc}]").appName("keras_digits").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    df = to_spark(spark)
    model = train(df, arguments.num_proc, arguments.epochs)
    for record in model.getHistory():
        held_out = record["validation"]
        print(f"epoch {record['epoch'] + 1}: loss {record['train']['loss']:.3f}, held out {held_out['accuracy']:.1%}")
    print(f"accuracy on digits not trained on: {accuracy(model, df):.1%}")
    spark.stop()


if __name__ == "__main__":
    main()
