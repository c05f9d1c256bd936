"""A network on scikit-learn's handwritten digits by TensorFlow, in a loop of one's own, on any number of ranks.

    python examples/tensorflow_digits.py                                  # alone
    python examples/tensorflow_digits.py --np 2                           # in two local processes
    torchrun --nproc-per-node 2 examples/tensorflow_digits.py             # by a launcher (docs/launching.md)

Every rank reads its own rows of each global batch; the model that comes out is the same for any number of ranks by
which the batch can be divided.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

import sparkvod

if TYPE_CHECKING:
    import tensorflow as tf


def make_model() -> tf.keras.Model:
    """Returns a small network for images [rows, 64] that gives logits [rows, 10]."""
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential([layers.InputLayer((64,)), layers.Dense(128, activation="relu"), layers.Dense(10)])


def my_rows(images: np.ndarray, labels: np.ndarray, batch_size: int, rank: int, size: int) -> Any:
    """Returns an epoch of this rank's rows of each global batch; all ranks must use the same seed."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images))
    data = data.batch(batch_size, drop_remainder=True)
    return data.map(lambda x, y: (x[rank::size], y[rank::size])).prefetch(2)


def train(epochs: int = 5, batch_size: int = 60) -> float:
    """Trains and returns the accuracy on the 297 digits that were kept out; call it on every rank.

    Args:
        epochs: how often all rows are shown.
        batch_size: rows of a step, over all ranks together.
    """
    import tensorflow as tf
    from sklearn.datasets import load_digits

    import sparkvod.tensorflow as hvd

    hvd.init()
    digits = load_digits()
    images, labels = (digits.images.reshape(-1, 64) / 16).astype("float32"), digits.target
    tf.random.set_seed(1)  # the same order of the rows on all ranks
    model = make_model()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(0.003)
    hvd.broadcast_variables(model.weights, root_rank=0)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        # The gradients that come out are means over the ranks, reduced while the backward pass goes on.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss)

    accuracy = 0.0
    data = my_rows(images[:1500], labels[:1500], batch_size, hvd.rank(), hvd.size())
    for epoch in range(epochs):
        loss = np.mean([step(x, y) for x, y in data])
        told = np.argmax(model(images[1500:], training=False), 1)
        accuracy = float(np.mean(told == labels[1500:]))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy on digits not trained on {accuracy:.1%}")
    return accuracy


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=60, help="rows of a step, over all ranks together")
    parser.add_argument("--np", type=int, help="start this many local processes")
    arguments = parser.parse_args()
    if arguments.np:
        sparkvod.run_local(train, (arguments.epochs, arguments.batch_size), np=arguments.np)
    else:
        train(arguments.epochs, arguments.batch_size)


if __name__ == "__main__":
    main()
