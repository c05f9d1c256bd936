"""Refuses layers that would train unsynchronised although they were asked to be synchronised."""

from __future__ import annotations

from typing import Any

import keras


def refuse_synchronized(model: Any) -> None:
    """Refuse a model with a ``BatchNormalization(synchronized=True)``, in nested models and wrappers too.

    Keras synchronises it over the replicas of ``tf.distribute`` and of nothing else, so each rank would normalise by
    its own rows.

    Raises:
        ValueError: there is such a layer; names each.
    """
    found = [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and getattr(layer, "synchronized", False)
    ]
    if found:
        raise ValueError(
            f"BatchNormalization {', '.join(map(repr, found))} has synchronized=True, which Keras does under "
            "tf.distribute only: each rank would normalise by its own rows. Use synchronized=False, or "
            "sparkvod.tensorflow.SyncBatchNormalization"
        )
