"""Steps on PyTorch, which runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sparkvod.estimators.keras import steps


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

    def train(
        self,
        inputs: Sequence[np.ndarray],
        labels: Sequence[np.ndarray],
        weights: np.ndarray | None,
        factors: np.ndarray,
        share: float,
        apply: bool,
    ) -> np.ndarray:
        """Goes forward and backward, and applies the gradients of all ranks."""
        loop, counts = self.loop, share > 0
        inputs_, labels_, weights_ = _tensors(inputs), _tensors(labels), _tensor(weights)
        outputs = loop.feed.call(inputs_, training=counts)
        totals, penalty = loop.losses(inputs_, labels_, outputs, weights_)
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
                loop.update_metrics(inputs_, labels_, [output.detach() for output in outputs], weights_)
            found: np.ndarray = loop.sums(totals, penalty, outputs[0].shape[0]).detach().cpu().numpy()
        return found

    def evaluate(
        self, inputs: Sequence[np.ndarray], labels: Sequence[np.ndarray], weights: np.ndarray | None
    ) -> np.ndarray:
        """Returns the batch's sums without training on it."""
        loop = self.loop
        with torch.no_grad():
            inputs_, labels_, weights_ = _tensors(inputs), _tensors(labels), _tensor(weights)
            outputs = loop.feed.call(inputs_, training=False)
            totals, penalty = loop.losses(inputs_, labels_, outputs, weights_)
            loop.update_metrics(inputs_, labels_, outputs, weights_)
            found: np.ndarray = loop.sums(totals, penalty, outputs[0].shape[0]).cpu().numpy()
        return found


def _tensor(array: np.ndarray | None) -> Any:
    if array is None:
        return None
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _tensors(arrays: Sequence[np.ndarray]) -> list[Any]:
    return [_tensor(array) for array in arrays]


def compiled(function: Callable[[Any], Any], inputs: Sequence[Any]) -> Callable[[Sequence[np.ndarray]], Any]:
    """Returns a function of arrays, which runs eagerly and without gradients."""

    def call(arrays: Sequence[np.ndarray]) -> Any:
        with torch.no_grad():
            return function(_tensors(arrays))

    return call
