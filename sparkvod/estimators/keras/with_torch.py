"""Steps on PyTorch, which runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sparkvod.estimators.keras import steps
from sparkvod.estimators.keras.model_io import Feed
from sparkvod.estimators.torch.model_io import tensor


def use_threads(number: int) -> None:
    """Sets the threads of an operation."""
    torch.set_num_threads(number)


def random_state() -> Any:
    """Returns the state of PyTorch's generator, from which dropout without a seed draws."""
    return torch.get_rng_state().numpy()


def set_random_state(state: Any) -> None:
    """Takes what :func:`random_state` returned."""
    torch.set_rng_state(torch.from_numpy(state))


class Steps(steps.Steps):
    """Runs steps eagerly."""

    def train(self, rows: steps.Rows, factors: np.ndarray, share: float, apply: bool) -> np.ndarray:
        """Goes forward and backward, and applies the gradients of all ranks."""
        loop, counts = self.loop, share > 0
        inputs, labels, weights = _tensors(rows)
        outputs = loop.feed.call(inputs, training=counts)
        totals, penalty = loop.losses(inputs, labels, outputs, weights, counts)
        loss = penalty * share
        for factor, total in zip(factors.tolist(), totals, strict=True):
            loss = loss + total * factor
        self.optimizer.scale_loss(loss).backward()  # summed up in .grad with those of the passes before
        with torch.no_grad():
            if apply:
                values = [variable.value for variable in self.variables]
                self.optimizer.apply([value.grad for value in values], self.variables)
                for value in values:
                    value.grad = None
            if counts:
                loop.update_metrics(inputs, labels, [output.detach() for output in outputs], weights)
            found: np.ndarray = loop.sums(totals, penalty, outputs[0].shape[0]).detach().cpu().numpy()
        return found

    def evaluate(self, rows: steps.Rows) -> np.ndarray:
        """Returns the batch's sums without training on it."""
        loop = self.loop
        with torch.no_grad():
            inputs, labels, weights = _tensors(rows)
            outputs = loop.feed.call(inputs, training=False)
            totals, penalty = loop.losses(inputs, labels, outputs, weights, training=False)
            loop.update_metrics(inputs, labels, outputs, weights)
            found: np.ndarray = loop.sums(totals, penalty, outputs[0].shape[0]).cpu().numpy()
        return found


def _tensors(rows: steps.Rows) -> tuple[list[Any], list[Any], Any]:
    weights = None if rows.weights is None else tensor(rows.weights)
    return [tensor(array) for array in rows.inputs], [tensor(array) for array in rows.labels], weights


def compiled(feed: Feed) -> Callable[[Sequence[np.ndarray]], list[Any]]:
    """Returns the model as a function of arrays, which runs eagerly and without gradients."""

    def call(arrays: Sequence[np.ndarray]) -> list[Any]:
        with torch.no_grad():
            return feed.call([tensor(array) for array in arrays], training=False)

    return call
