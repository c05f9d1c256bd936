"""Calls of functions with collectives follow each other in the order of the program.

The names of a function's collectives are the same in each call, so two calls must never be in flight together: a rank
could match a tensor of one call with that of another. TensorFlow keeps the order of calls that change the same
resource, but a resource of our own would be captured by each function, and ``tf.saved_model.save`` refuses functions
with resources that their object does not own. Therefore TensorFlow is only made to believe that such calls share one.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import register_acd_resource_resolver

_MARK = "sparkvod_ended"
_CALLS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
}
_known: Any = WeakKeyDictionary()

# Stands for the resource. No op takes it: TensorFlow only asks whether two ops use the same one.
with tf.Graph().as_default():
    _SHARED = tf.zeros([], name="sparkvod_order")


def end_after(result: Any) -> None:
    """Let the function that is being built end only after a collective, also where nothing uses all of its results.

    An operation with a side effect does that: functions and iterations of loops end after theirs. The collectives
    themselves are declared without side effects, so that those of one call overlap. ``CheckNumerics`` of a constant
    does nothing, but is declared with a side effect, and XLA, whose refusal of collectives has a message of ours, and
    ``tf.data``, which runs functions without side effects in parallel, know it as such.

    Args:
        result: a result of the collective.
    """
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies([result]):
        mark = tf.raw_ops.CheckNumerics(tensor=0.0, message="", name=_MARK).op
    if not graph._add_control_dependencies:  # a function's derivative, in which TensorFlow adds none by itself
        graph.control_outputs.append(mark)


def use(result: Any) -> Any:
    """Return an operation that uses a collective's result, so that a graph runs the collective.

    Args:
        result: a tensor of numbers.
    """
    return tf.raw_ops.CheckNumerics(tensor=tf.cast(tf.reduce_sum(result), tf.float32), message="").op


@register_acd_resource_resolver
def _sparkvod_order(op: Any, reads: Any, writes: Any) -> bool:
    # TensorFlow calls this for each operation of a function that was built, until nothing is added any more.
    if _SHARED in writes or not _takes_part(op):
        return False
    writes.add(_SHARED)
    return True


def _takes_part(op: Any) -> bool:
    if op.type == "CheckNumerics":
        return bool(op.name.rpartition("/")[2].startswith(_MARK))
    return any(_has_collectives(op.graph, name) for name in _called_by(op))


def _called_by(op: Any) -> list[str]:
    names = []
    for attribute in _CALLS.get(op.type, ()):
        value = op.get_attr(attribute)
        names += [function.name for function in (value if isinstance(value, list) else [value])]
    return names


def _has_collectives(graph: Any, name: str) -> bool:
    function = None
    while function is None and graph is not None:
        function, graph = graph._get_function(name), getattr(graph, "outer_graph", None)
    body = getattr(function, "graph", None)
    if body is None:
        return False
    if body not in _known:
        _known[body] = any(
            op.type.startswith("Sparkvod") or any(_has_collectives(body, called) for called in _called_by(op))
            for op in body.get_operations()
        )
    return bool(_known[body])
