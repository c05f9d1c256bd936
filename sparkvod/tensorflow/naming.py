"""Names of operations: the same on all ranks, and never twice at the same time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import tensorflow as tf

from sparkvod.core.names import now
from sparkvod.core.ops import check_name

T = TypeVar("T")

_used: Any = WeakKeyDictionary()
_COUNTED = re.compile(r"(_\d+)+$")


def run(kind: str, name: str | None, tensor: Any, call: Callable[[str], T], process_set: int) -> T:
    """Calls ``call`` with the operation's name.

    A name that was given is taken. Else an eager operation borrows one, over and over the same, so that the engine's
    response cache knows it, and one that is built into a graph gets one made of the graph's and the tensor's names,
    which do not depend on how often a function was traced before.

    Args:
        kind: ``allreduce`` and so on.
        name: the name that was given, or None.
        tensor: the first tensor, symbolic in a graph; None when there is none.
        call: runs the operation.
        process_set: number of the set among whose ranks it runs.
    """
    if name is not None:
        check_name(name)
    elif not tf.executing_eagerly():
        name = in_graph(kind, getattr(tensor, "name", "") or "")
    return now(kind, name, call, process_set)


def in_graph(kind: str, what: str) -> str:
    """Returns a name for an operation of the graph that is being built.

    Args:
        kind: the collective.
        what: what tells it from others; a number is put behind it where that does not suffice.
    """
    scope = _COUNTED.sub("", getattr(tf.compat.v1.get_default_graph(), "name", "") or "")
    return _numbered(f"{kind}.{scope}.{what}" if scope else f"{kind}.{what}")


def of_gradient(op: Any) -> str:
    """Return the name of the collective that computes the gradient of another one.

    It follows from the other one's name, because TensorFlow may differentiate independent operations in a different
    order on each rank: by their order, gradients of equal shapes would be reduced with each other. Each further
    gradient of the same collective within a graph gets a number, because both may be in flight at the same time.

    Args:
        op: the operation that is differentiated.
    """
    name = op.get_attr("tensor_name")
    name = name.decode() if isinstance(name, bytes) else name
    # Eager operations run one after the other.
    return f"{name}.grad" if tf.executing_eagerly() else _numbered(f"{name}.grad")


def _numbered(name: str) -> str:
    graph = tf.compat.v1.get_default_graph()
    seen = _used.get(graph)
    if seen is None:
        seen = _used.setdefault(graph, Counter())
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}.{seen[name]}"
