"""Keras's losses as sums over rows, so that ranks with different numbers of rows add up to the whole batch's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

#: Losses that know a class by its number, from 0.
_SPARSE = ("sparse_categorical_crossentropy", "categorical_generalized_cross_entropy")
#: Losses that compare outputs with each other: of a single one they say the same, whatever it is.
_AMONG_OUTPUTS = ("categorical_crossentropy", "categorical_focal_crossentropy", "cosine_similarity")
#: Losses whose label is a number from 0 to 1.
_PROBABILITIES = ("binary_crossentropy", "binary_focal_crossentropy")
_GUESSED = ("crossentropy", "ce")


class LossTerm:
    """One label's loss.

    Args:
        loss: a ``keras.losses.Loss``, or a function ``f(y_true, y_pred)`` that returns a mean over rows or a number per
            row, or more of them.
        name: its name, for messages.

    Attributes:
        takes_classes: whether its label is the number of a class.
        is_binary: whether its label is a number from 0 to 1.
        among: the axis along which it compares outputs with each other, None where it does not.
        is_known: whether it is one of Keras's own, which compare number by number unless they take classes.
        divides: whether it is a mean; else it is the sum over the rows of all ranks.
        ignored: the class that it passes over, or None.
    """

    def __init__(self, loss: Any, name: str) -> None:
        self.loss, self.name = loss, name
        is_object = isinstance(loss, keras.losses.Loss)
        self._values = loss.call if is_object else loss
        inner = getattr(loss, "fn", type(loss) if is_object else loss)
        known = str(getattr(inner, "__name__", ""))
        self.is_known = str(getattr(inner, "__module__", "")).partition(".")[0] == "keras"
        self.takes_classes = self.is_known and known in _SPARSE
        self.is_binary = self.is_known and known in _PROBABILITIES
        is_among = self.is_known and known in _AMONG_OUTPUTS
        self.among = int(getattr(loss, "_fn_kwargs", {}).get("axis", -1)) if is_among else None
        self.divides = getattr(loss, "reduction", "mean") != "sum"
        ignored = getattr(loss, "ignore_class", None) if self.takes_classes else None
        self.ignored = None if ignored is None else int(ignored)
        self._dtype = loss.dtype if is_object else None

    def values(self, label: Any, output: Any) -> Any:
        """Returns what the loss says of both in its dtype, as Keras has it: one number, or numbers ``[rows, ...]``."""
        dtype = self._dtype or keras.backend.floatx()
        mask = getattr(output, "_keras_mask", None)
        output = ops.convert_to_tensor(output, dtype=dtype)
        if mask is not None:
            output._keras_mask = mask
        if not self.takes_classes:
            label = ops.convert_to_tensor(label, dtype=dtype)
        return self._values(label, output)

    def normaliser(self, label: np.ndarray, weights: np.ndarray | None) -> float:
        """Returns the sum of the rows' weights, by which the sum over all ranks is divided."""
        rows = np.ones(len(label)) if weights is None else weights
        if self.ignored is not None:
            rows = rows * (label != self.ignored).reshape(len(label), -1).mean(1)
        return float(rows.sum())

    def total(self, label: Any, output: Any, weights: Any) -> Any:
        """Returns the differentiable sum over this rank's rows of the rows' weights times their losses."""
        values = self.values(label, output)
        if len(values.shape) == 0:
            rows = ops.cast(ops.shape(output)[0], values.dtype)
            return values * rows if self.divides else values
        values = self._by_row(values, getattr(output, "_keras_mask", None))
        return ops.sum(values if weights is None else values * ops.cast(weights, values.dtype))

    def _by_row(self, values: Any, mask: Any) -> Any:
        """Returns a number per row: the mean over what a row has of them (the sum, for a loss that is a sum)."""
        axes = tuple(range(1, len(values.shape)))
        if mask is not None and len(mask.shape) == len(values.shape) > 1 and self.ignored is None:
            counted = ops.cast(mask, values.dtype)
            summed = ops.sum(values * counted, axis=axes)
            return summed / ops.maximum(ops.sum(counted, axis=axes), 1.0) if self.divides else summed
        if not axes:
            return values
        return ops.mean(values, axis=axes) if self.divides else ops.sum(values, axis=axes)


def by_label(value: Any, labels: Sequence[str], outputs: Sequence[str], what: str) -> list[Any]:
    """Returns one thing per label from a single one, a list, or a dict by the names of outputs or labels.

    Raises:
        ValueError: it has other names, or another number.
    """
    if isinstance(value, dict):
        strangers = sorted(set(map(str, value)) - {*labels, *outputs})
        if strangers:
            raise ValueError(
                f"{what} for {', '.join(strangers)} was found, names of outputs ({', '.join(outputs)}) or labels "
                f"({', '.join(labels)}) were expected"
            )
        return [value.get(output, value.get(label)) for label, output in zip(labels, outputs, strict=True)]
    if not isinstance(value, (list, tuple)):
        return [value] * len(labels)
    if len(value) != len(labels):
        raise ValueError(
            f"{what} with {len(value)} members was found, one per label ({len(labels)}), or a single one, was expected"
        )
    return list(value)


def term_for(loss: Any, label: str, label_shape: Sequence[int], output_shape: Sequence[int]) -> LossTerm:
    """Returns the term for what Keras takes as a loss: an object, a function, a name.

    Args:
        loss: that.
        label: name of the label's column.
        label_shape: the label's shape without the rows.
        output_shape: the output's shape without the rows.

    Raises:
        ValueError: there is none of that name, or none at all.
    """
    if loss is None:
        raise ValueError(f"no loss was found for label {label!r}, one was expected; pass loss='mse', or a list of them")
    if isinstance(loss, str) and loss.lower() in _GUESSED:
        if tuple(output_shape) and output_shape[-1] == 1:
            loss = "binary_crossentropy"
        else:
            same = math.prod(label_shape) == math.prod(output_shape)
            loss = "categorical_crossentropy" if same else "sparse_categorical_crossentropy"
    if isinstance(loss, (str, dict)):
        name = str(loss)
        try:
            loss = keras.losses.get(loss)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"loss={name!r} was found, which Keras does not know ({error}); pass a name such as 'mse', a "
                "keras.losses.Loss, or a function f(y_true, y_pred)"
            ) from error
    else:
        name = str(getattr(loss, "__name__", getattr(loss, "name", type(loss).__name__)))
    return LossTerm(loss, name)
