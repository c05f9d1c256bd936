"""``model.fit`` of Keras 3 on scikit-learn's handwritten digits, on any number of ranks and any of Keras's backends.

    python examples/keras_fit.py                                  # alone
    KERAS_BACKEND=jax python examples/keras_fit.py --np 2         # in two local processes
    torchrun --nproc-per-node 2 examples/keras_fit.py             # by a launcher (docs/launching.md)

Four lines are sparkvod's: ``init``, the rank's part of the rows, the optimizer, and the callbacks.
"""

from __future__ import annotations

import argparse

import sparkvod


def train(epochs: int = 6, batch_size: int = 64) -> float:
    """Trains and returns the accuracy on the 297 digits that were kept out; call it on every rank.

    Args:
        epochs: how often all rows are shown.
        batch_size: rows of a step, over all ranks together.
    """
    import keras
    from sklearn.datasets import load_digits

    import sparkvod.keras as hvd

    hvd.init()
    digits = load_digits()
    images, labels = (digits.images.reshape(-1, 64) / 16).astype("float32"), digits.target
    mine = slice(hvd.rank(), 1500 // hvd.size() * hvd.size(), hvd.size())  # as many rows on each rank
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.004)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=max(batch_size // hvd.size(), 1),
        epochs=epochs,
        validation_data=(images[1500:], labels[1500:]),
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.004, warmup_epochs=2),
        ],
    ).history
    if hvd.rank() == 0:
        for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["val_accuracy"], strict=True)):
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy on digits not trained on {accuracy:.1%}")
    return float(history["val_accuracy"][-1])


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a step, over all ranks together")
    parser.add_argument("--np", type=int, help="start this many local processes")
    arguments = parser.parse_args()
    if arguments.np:
        sparkvod.run_local(train, (arguments.epochs, arguments.batch_size), np=arguments.np)
    else:
        train(arguments.epochs, arguments.batch_size)


if __name__ == "__main__":
    main()
