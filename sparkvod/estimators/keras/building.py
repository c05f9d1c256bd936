"""From the task's payload to a model with its losses and metrics: on the driver, to check, and on the ranks alike."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from sparkvod.errors import DataError
from sparkvod.estimators import trying
from sparkvod.estimators.columns import ColumnLike, Input, Label, OutputSpec
from sparkvod.estimators.keras import checking, packing
from sparkvod.estimators.keras.custom import found_in_parts
from sparkvod.estimators.keras.loop import Loop
from sparkvod.estimators.keras.losses import by_label
from sparkvod.estimators.keras.model_io import Feed, labels, spec
from sparkvod.estimators.parts import dump_part


class Parts:
    """What the estimator packed.

    Args:
        payload: a pickled dict of pickled parts.

    Attributes:
        custom_objects: classes and functions by name.
    """

    def __init__(self, payload: bytes) -> None:
        self._parts: dict[str, bytes] = pickle.loads(payload)
        self.custom_objects: dict[str, Any] = dict(pickle.loads(self._parts["custom_objects"]))

    def raw(self, name: str) -> Any:
        """Returns a part as it was packed."""
        return pickle.loads(self._parts[name])

    def made(self, name: str) -> Any:
        """Returns a part with new objects of Keras in it."""
        return packing.put_together(self.raw(name), self.custom_objects)

    def model(self) -> Any:
        """Returns a new copy of the model."""
        return packing.load_model(self._parts["model"])

    def optimizer(self) -> Any:
        """Returns a new optimizer, not built."""
        return self.made("optimizer")


def pack(parts: dict[str, Any], model: Any, custom_objects: dict[str, Any]) -> bytes:
    """Returns the payload.

    Args:
        parts: Params by name.
        model: the model.
        custom_objects: classes and functions by name.

    Raises:
        ValueError: a rank could not make an optimizer, a loss or a metric again from its configuration.
        TypeError: something cannot be pickled.
    """
    apart = {}
    for name, part in parts.items():
        with _made_again(name, part):
            apart[name] = packing.taken_apart(part, custom_objects)
    objects = {**found_in_parts(list(parts.values())), **custom_objects}
    packed = {}
    for name, part in parts.items():
        packed[name] = dump_part(name, apart[name])
        with _made_again(name, part):
            packing.put_together(pickle.loads(packed[name]), objects)
    packed["dtype_policy"] = pickle.dumps(packing.policy_name())
    # As compile() does, unless it has been called; asked of the model itself, not of a copy.
    scales = model.dtype_policy.name == "mixed_float16" and parts.get("optimizer") is not getattr(
        model, "optimizer", None
    )
    packed["scales_loss"] = pickle.dumps(scales)
    packed["custom_objects"] = dump_part("custom_objects", objects)
    packed["model"] = packing.dump_model(model, objects)
    return pickle.dumps(packed)


@contextmanager
def _made_again(name: str, part: Any) -> Iterator[None]:
    """Says what to do about a part that its configuration does not make again."""
    try:
        yield
    except Exception as error:
        shown = type(part).__name__ if hasattr(part, "get_config") else repr(part)
        raise ValueError(
            f"{name}={shown} was found, which cannot be made again from its get_config() ({type(error).__name__}: "
            f"{error}), as each rank does; give it a get_config() with all that its constructor takes (a loss's or "
            "metric's has a name as well), write a lambda as a function with a name, and pass what Keras cannot find "
            "by custom_objects={'name': class or function}"
        ) from error


def has_own_loss(model: Any) -> bool:
    """Returns whether the model's class computes the loss itself."""
    own = getattr(type(model), "compute_loss", None)
    return own is not None and own is not keras.Model.compute_loss


def build(
    parts: Parts,
    model: Any,
    inputs: Sequence[Input],
    label_columns: Sequence[ColumnLike],
    tails: Sequence[tuple[int, ...] | None],
    weighted: bool,
) -> tuple[Loop, tuple[Label, ...], list[OutputSpec]]:
    """Builds a model and all that is trained and measured, by rows of zeros.

    Args:
        parts: what was packed.
        model: a model from them.
        inputs: how the feature columns make its inputs.
        label_columns: the label columns.
        tails: the labels' shapes without the rows, None where none was given.
        weighted: whether there are sample weights.

    Returns:
        The loop, how columns make labels, and the outputs in the labels' order.

    Raises:
        DataError: something does not fit.
        ValueError: a loss or metric is none.
    """
    names = [column.name for column in label_columns]
    feed = Feed(model, inputs, names)
    outputs = checking.forward(feed)
    own_loss = has_own_loss(model)
    losses = by_label(parts.made("loss"), names, feed.output_names, "loss")
    terms, planned = checking.plan_labels(outputs, label_columns, losses, tails, weighted, own_loss)
    factors = by_label(parts.raw("loss_weights") or [1.0] * len(names), names, feed.output_names, "loss_weights")
    model.compile(
        optimizer=None,
        loss=in_model_order(feed, parts.made("loss")) if own_loss else None,
        metrics=in_model_order(feed, parts.made("metrics")),
        weighted_metrics=in_model_order(feed, parts.made("weighted_metrics"), "weighted_metrics"),
        jit_compile=False,
    )
    loop = Loop(feed, terms, [1.0 if factor is None else float(factor) for factor in factors], own_loss)
    specs = [spec(output) for output in outputs]
    # Not as many rows as an output has numbers: a metric that broadcasts labels against them would pass.
    rows = trying.row_counts(
        *(s.tail for s in specs), *(c.shape for c in label_columns), *(p.tail or () for p in planned)
    )[0]
    nothing = {column.name: trying.nothing(column, rows) for column in label_columns}
    made = [keras.ops.convert_to_tensor(array) for array in labels(planned, nothing, rows)]
    weights = keras.ops.ones((rows,)) if weighted else None
    tried = [keras.ops.convert_to_tensor(array) for array in trying.zeros(inputs, rows)]
    try:
        outputs = loop.build(tried, made, weights)
    except Exception as error:
        raise DataError(
            f"the metrics cannot be computed from the model's outputs and the labels ({type(error).__name__}: "
            f"{error}); a list of metrics for all outputs, a list of lists with one per output, or a dict by the "
            f"names of outputs ({', '.join(feed.output_names)}) was expected"
        ) from error
    if own_loss:
        checking.try_own_loss(loop, tried, made, outputs, weights)
    return loop, planned, specs


def in_model_order(feed: Feed, found: Any, what: str = "metrics") -> Any:
    """Returns losses or metrics as ``compile`` takes them: by output.

    Args:
        feed: the model and its outputs.
        found: a list with one member per label is in the labels' order; a dict may name outputs or labels.
        what: what they are, for messages.

    Raises:
        ValueError: there are other names. (Keras passes over them where a model has one output.)
    """
    if isinstance(found, dict):
        by_label(found, feed.labels, feed.output_names, what)
        outputs = dict(zip(feed.labels, feed.output_names, strict=True))
        found = {name if name in feed.output_names else outputs[name]: value for name, value in found.items()}
    is_by_label = isinstance(found, list) and len(found) == len(feed.order) > 1
    return (feed.as_model_says(found) if is_by_label else found) or None
