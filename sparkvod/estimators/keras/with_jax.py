"""Steps on JAX: functions of the variables' values, compiled once for each number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from sparkvod import config
from sparkvod.errors import DataError
from sparkvod.estimators.keras import steps
from sparkvod.estimators.keras.loop import Loop
from sparkvod.estimators.keras.model_io import Feed
from sparkvod.estimators.keras.no_generator import random_state, set_random_state

__all__ = ["Steps", "compiled", "random_state", "set_random_state", "use_threads"]

#: Numbers of rows that predictions are compiled for: fewer rows are filled up to the next of them.
_PREDICTED = (16, steps.ROWS)


def use_threads(number: int) -> None:
    """Sets the threads of a computation; JAX takes this only before its first computation in a process."""
    config.set_environment({"NPROC": str(number)})


class Steps(steps.Steps):
    """Runs steps as compiled functions, which return what they would assign to variables."""

    def __init__(self, loop: Loop, optimizer: Any, passes: int) -> None:
        super().__init__(loop, optimizer, passes)
        trained = {id(variable) for variable in self.variables}
        rest = [*loop.model.variables, *loop.metric_variables]
        self._others = list({id(v): v for v in rest if id(v) not in trained}.values())
        # Gradients of the passes before; none while every step is applied.
        self._summed = [jnp.zeros(v.shape, v.dtype) for v in self.variables] if passes > 1 else []
        self._functions: dict[Any, Callable[..., Any]] = {}

    def train(self, rows: steps.Rows, factors: np.ndarray, share: float, apply: bool) -> np.ndarray:
        """Goes forward and backward, and applies the gradients of all ranks."""
        kind = ("train", share > 0, apply)
        if kind not in self._functions:
            self._functions[kind] = jax.jit(self._training(share > 0, apply))
        states = [self.variables, self._others, self.optimizer.variables]
        values = [_values(variables) for variables in states]
        sums, *after, self._summed = self._functions[kind](*values, self._summed, _arrays(rows), factors, share)
        for variables, changed in zip(states, after, strict=True):
            _assign(variables, changed)
        return np.asarray(sums, np.float64)

    def evaluate(self, rows: steps.Rows) -> np.ndarray:
        """Returns the batch's sums without training on it."""
        if "evaluate" not in self._functions:
            self._functions["evaluate"] = jax.jit(self._evaluating)
        sums, others = self._functions["evaluate"](_values(self.variables), _values(self._others), _arrays(rows))
        _assign(self._others, others)
        return np.asarray(sums, np.float64)

    def _training(self, counts: bool, apply: bool) -> Callable[..., Any]:
        optimizer = self.optimizer

        def step(
            trained: list[Any], others: list[Any], state: list[Any], summed: list[Any], rows: Any, *scales: Any
        ) -> Any:
            def loss_of(trained: list[Any]) -> Any:
                return self._forward(trained, others, rows, counts, counts, scales)

            (_, (sums, others_after)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
            if self.passes > 1:
                grads = [total + grad for total, grad in zip(summed, grads, strict=True)]
            if not apply:
                return sums, trained, others_after, state, grads
            variables = [*self.variables, *optimizer.variables]
            with keras.StatelessScope(list(zip(variables, [*trained, *state], strict=True))) as scope:
                optimizer.apply(grads, self.variables)
            after = [scope.get_current_value(variable) for variable in variables]
            zeros = [jnp.zeros_like(total) for total in summed]
            return sums, after[: len(trained)], others_after, after[len(trained) :], zeros

        return step

    def _evaluating(self, trained: list[Any], others: list[Any], rows: Any) -> Any:
        return self._forward(trained, others, rows, False, True, None)[1]

    def _forward(
        self, trained: list[Any], others: list[Any], rows: Any, training: bool, measured: bool, scales: Any
    ) -> Any:
        """Returns the loss as it is differentiated, or None without ``scales``, and the sums and other variables."""
        loop, (inputs, labels, weights) = self.loop, rows
        mapping = list(zip([*self.variables, *self._others], [*trained, *others], strict=True))
        loss = None
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            outputs = loop.feed.call(inputs, training=training)
            totals, penalty = loop.losses(inputs, labels, outputs, weights, training)
            if scales is not None:
                factors, share = scales
                loss = penalty * share
                for factor, total in zip(factors, totals, strict=True):
                    loss = loss + total * factor
                loss = self.optimizer.scale_loss(loss)  # by its loss_scale_factor, by which apply() divides
            if measured:
                loop.update_metrics(inputs, labels, outputs, weights)
            sums = loop.sums(totals, penalty, len(inputs[0]))
        return loss, (sums, [scope.get_current_value(variable) for variable in self._others])


def _values(variables: Sequence[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _arrays(rows: steps.Rows) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray | None]:
    return list(map(_narrow, rows.inputs)), list(map(_narrow, rows.labels)), rows.weights


def _narrow(array: np.ndarray) -> np.ndarray:
    """Returns whole numbers of 64 bits in 32, to which JAX would cut them without a word.

    Raises:
        DataError: they have no place there.
    """
    if array.dtype.kind not in "iu" or array.itemsize < 8:
        return array
    narrow = array.astype(f"{array.dtype.kind}4")
    if not np.array_equal(narrow, array):
        wide = array[narrow != array].flat[0]
        raise DataError(
            f"the whole number {wide} was found in a column, and JAX computes with 32 bits: none beyond "
            f"{np.iinfo(narrow.dtype).max} was expected; cast the column to double, or train on another backend"
        )
    return narrow


def compiled(feed: Feed) -> Callable[[Sequence[np.ndarray]], list[Any]]:
    """Returns the model as a function of arrays, compiled for two numbers of rows; what is filled up is cut off."""
    variables = list(feed.model.variables)
    values = _values(variables)

    def forward(values: list[Any], arrays: list[Any]) -> list[Any]:
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return feed.call(arrays, training=False)

    function = jax.jit(forward)

    def call(arrays: Sequence[np.ndarray]) -> list[Any]:
        rows = len(arrays[0])
        size = next((size for size in _PREDICTED if size >= rows), rows)
        found = function(values, [_filled(_narrow(array), size) for array in arrays])
        return [np.asarray(output)[:rows] for output in found]

    return call


def _filled(array: np.ndarray, rows: int) -> np.ndarray:
    """Returns an array of so many rows, the last of which are copies of the last one."""
    return array if len(array) == rows else np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])
