"""What goes into a model and comes out of it, in training, in checks and in prediction alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from sparkvod.data.schema import TEXT
from sparkvod.errors import DataError
from sparkvod.estimators import columns
from sparkvod.estimators.columns import ColumnLike, Input, Label, OutputSpec


def symbolic_inputs(model: Any) -> list[Any]:
    """Returns the symbolic inputs of a functional or built sequential model; none for another."""
    try:
        found = model.inputs
    except AttributeError:
        return []
    return list(found or [])


def input_dtypes(model: Any) -> list[str]:
    """Returns the dtypes of a model's symbolic inputs."""
    return [keras.backend.standardize_dtype(item.dtype) for item in symbolic_inputs(model)]


def plan_inputs(
    model: Any,
    features: Sequence[ColumnLike],
    shapes: Sequence[Sequence[int] | None] | None,
    dtypes: Sequence[str | None] | None,
) -> tuple[Input, ...]:
    """Returns how feature columns make the model's inputs.

    A model that knows its inputs gets all columns side by side in its only one, or one column in each: by name where
    the names are the same, else in order. ``shapes`` or a model that does not know them: as for every estimator.

    Args:
        model: the model.
        features: the feature columns in order.
        shapes: the Param ``input_shapes``.
        dtypes: the Param ``input_dtypes``.

    Raises:
        DataError: columns and inputs do not fit together.
    """
    known = symbolic_inputs(model)
    if shapes is not None or not known:
        default = (input_dtypes(model) or [keras.backend.floatx()])[0]
        return _checked(columns.plan_inputs(features, shapes, dtypes, default), features)
    if len(known) == 1:
        groups = [(tuple(features), known[0])]
    elif len(known) == len(features):
        by_name = {column.name: column for column in features}
        same = {item.name for item in known} == set(by_name)
        chosen = [by_name[item.name] for item in known] if same else list(features)
        groups = [((column,), item) for column, item in zip(chosen, known, strict=True)]
    else:
        raise DataError(
            f"a model with {len(known)} inputs ({', '.join(item.name for item in known)}) and {len(features)} feature "
            f"columns ({', '.join(column.name for column in features)}) were found, one column per input was expected; "
            "put columns that belong together into one, for example with VectorAssembler"
        )
    given = dtypes or [None] * len(groups)
    if len(given) != len(groups):
        raise DataError(f"input_dtypes with {len(given)} dtypes was found, one per input ({len(groups)}) was expected")
    planned = tuple(
        Input(
            tuple(column.name for column in members),
            _tail(item, members),
            dtype or keras.backend.standardize_dtype(item.dtype),
        )
        for (members, item), dtype in zip(groups, given, strict=True)
    )
    return _checked(planned, features)


def _checked(planned: tuple[Input, ...], features: Sequence[ColumnLike]) -> tuple[Input, ...]:
    """Refuses text where an input takes numbers, and numbers where it takes text."""
    text = {column.name: column.dtype == TEXT for column in features}
    for item in planned:
        for name in item.columns:
            if text[name] != (item.dtype == "string"):
                raise DataError(
                    f"feature column {name!r} with {'text' if text[name] else 'numbers'} was found for an input of "
                    f"dtype {item.dtype}, {'numbers were' if text[name] else 'text was'} expected; give text to an "
                    "Input(dtype='string') with a lookup (StringLookup, TextVectorization) of its own"
                )
    return planned


def _tail(item: Any, members: Sequence[ColumnLike]) -> tuple[int, ...]:
    width = sum(math.prod(column.shape) for column in members)
    shape = [-1 if n is None else int(n) for n in item.shape[1:]]
    rest = math.prod(n for n in shape if n != -1)
    if shape.count(-1) == 1 and rest and width % rest == 0:
        shape[shape.index(-1)] = width // rest
    if -1 in shape or math.prod(shape) != width:
        names = ", ".join(column.name for column in members)
        raise DataError(
            f"the model's input {item.name!r} has the shape {['rows', *item.shape[1:]]}, and the feature "
            f"column{'s' * (len(members) > 1)} {names} {'have' if len(members) > 1 else 'has'} {width} "
            f"number{'s' * (width != 1)} per row: as many were expected; change feature_cols or the model's Input"
        )
    return tuple(shape)


class Feed:
    """How a model is called, and what it returns.

    Args:
        model: the model.
        inputs: how feature columns make its inputs.
        labels: names of the labels.

    Attributes:
        labels: these.
        order: for each label, the place of its output in what the model returns.
        output_names: the outputs' names in the labels' order; the labels' own where the model names none.
    """

    def __init__(self, model: Any, inputs: Sequence[Input], labels: Sequence[str]) -> None:
        self.model, self.inputs, self.labels = model, tuple(inputs), list(labels)
        names = list(getattr(model, "output_names", None) or [])
        if len(names) != len(labels):
            names = list(labels)
        # Labels that are named as the outputs are find their own, in whatever order.
        self.order = [names.index(label) if set(names) == set(labels) else k for k, label in enumerate(labels)]
        self.output_names = [names[place] for place in self.order]
        structure = getattr(model, "input", None) if symbolic_inputs(model) else None
        # A dict, say: what a tensor, or a list of several, does not say by itself.
        is_plain = not isinstance(structure, (dict, list, tuple)) or (
            isinstance(structure, list) and len(structure) == len(self.inputs) > 1
        )
        self._structure = None if is_plain else structure

    def arrays(self, found: Mapping[str, np.ndarray], rows: int) -> list[np.ndarray]:
        """Returns the model's inputs as arrays."""
        return [item.array(found, rows) for item in self.inputs]

    def call(self, tensors: Sequence[Any], training: bool) -> list[Any]:
        """Returns the model's outputs in the labels' order.

        Raises:
            TypeError: it returned something else than tensors.
        """
        return self.outputs(self.run(tensors, training))

    def call_arrays(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Returns the outputs, in inference and in the labels' order, of inputs as arrays."""
        return self.call([keras.ops.convert_to_tensor(array) for array in arrays], training=False)

    def run(self, tensors: Sequence[Any], training: bool) -> Any:
        """Returns what the model returns."""
        if self._structure is not None:
            packed = keras.tree.pack_sequence_as(self._structure, list(tensors))
        else:
            packed = tensors[0] if len(tensors) == 1 else list(tensors)
        return self.model(packed, training=training)

    def outputs(self, result: Any) -> list[Any]:
        """Returns the outputs in the labels' order, of what the model returned.

        Raises:
            TypeError: that has something else than tensors in it.
        """
        found = keras.tree.flatten(result)
        for item in found:
            if not keras.ops.is_tensor(item):
                raise TypeError(f"a model that returns a {type(item).__name__} was found, tensors were expected")
        return [found[place] for place in self.order] if len(found) == len(self.order) else found

    def as_model_says(self, items: Sequence[Any]) -> Any:
        """Returns what is in the labels' order in the model's, a single one as it is: as metrics take them."""
        if len(items) == 1:
            return items[0]
        return [items[self.order.index(place)] for place in range(len(items))]


def spec(output: Any) -> OutputSpec:
    """Returns what is known of an output whose first dimension is the rows."""
    return OutputSpec(tuple(int(n) for n in output.shape[1:]), keras.backend.standardize_dtype(output.dtype))


def labels(plan: Sequence[Label], found: Mapping[str, np.ndarray], rows: int) -> list[np.ndarray]:
    """Returns the labels as arrays."""
    return [item.array(found, rows) for item in plan]
