"""A step of training or validation on one rank: one class per backend of Keras."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from sparkvod.estimators.keras.loop import Loop
from sparkvod.estimators.keras.model_io import Feed

_MODULES = {name: f"sparkvod.estimators.keras.with_{name}" for name in ("tensorflow", "torch", "jax")}

#: Rows that are predicted at a time. Of the 10,000 that come from Spark together, layers' outputs do not fit into a
#: core's cache, and those of images hardly into memory: a small CNN predicts 256 rows 1.5 times as fast per row.
ROWS = 256


@dataclass(frozen=True)
class Rows:
    """What goes into a step, all arrays with the rows as their first dimension.

    Attributes:
        inputs: the model's inputs.
        labels: the labels.
        weights: the rows' weights, or None.
    """

    inputs: Sequence[np.ndarray]
    labels: Sequence[np.ndarray]
    weights: np.ndarray | None


class Steps(ABC):
    """Runs steps.

    Args:
        loop: the model with losses and metrics, built.
        optimizer: the distributed optimizer, built.
        passes: batches whose gradients are summed before they are exchanged.
    """

    def __init__(self, loop: Loop, optimizer: Any, passes: int) -> None:
        self.loop, self.optimizer, self.passes = loop, optimizer, passes
        self.variables = list(loop.model.trainable_variables)

    @abstractmethod
    def train(self, rows: Rows, factors: np.ndarray, share: float, apply: bool) -> np.ndarray:
        """Goes forward and backward, and applies the gradients of all ranks.

        Args:
            rows: this rank's rows.
            factors: what the terms' sums are multiplied by.
            share: this rank's rows over those of all ranks. With 0 the rows only stand in for none: they are predicted
                as in evaluation, so that nothing changes by them, and count for nothing.
            apply: whether the gradients are applied now; else they are summed up.

        Returns:
            The batch's sums, without the normalisers and the rows.
        """

    @abstractmethod
    def evaluate(self, rows: Rows) -> np.ndarray:
        """Returns the batch's sums without training on it."""


def for_backend(loop: Loop, optimizer: Any, passes: int) -> Steps:
    """Returns the steps of the backend that Keras runs on."""
    made: Steps = _module().Steps(loop, optimizer, passes)
    return made


def use_threads(number: int) -> None:
    """Lets the backend compute with so many threads, where it has not begun with another number."""
    _module().use_threads(number)


def random_state() -> Any:
    """Returns the state of the backend's own generator, picklable."""
    return _module().random_state()


def set_random_state(state: Any) -> None:
    """Takes what :func:`random_state` returned."""
    _module().set_random_state(state)


def compiled(feed: Feed) -> Callable[[Sequence[np.ndarray]], list[Any]]:
    """Returns the model in inference as a function of arrays, at most :data:`ROWS` rows, to tensors or arrays."""
    made: Callable[[Sequence[np.ndarray]], list[Any]] = _module().compiled(feed)
    return made


def _module() -> Any:
    return importlib.import_module(_MODULES[keras.backend.backend()])
