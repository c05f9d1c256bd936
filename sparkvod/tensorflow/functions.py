"""Spreading variables and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from sparkvod.core import basics, objects
from sparkvod.core.ops import check_root, own_set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.tensorflow import naming, ops, ordering, raw

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


@ops.as_written
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrites variables with the root's values.

    Args:
        variables: TensorFlow's variables or Keras's, in the same order on all ranks.
        root_rank: whose values they are, a rank of the world.
        process_set: the ranks that take part, by default all.
        inplace: for compatibility; variables are always overwritten.

    Returns:
        In a TF1 graph the operation that does it; else None.

    Raises:
        MismatchError: the ranks' variables differ in number, shape or dtype; nothing was overwritten.
        HorovodInternalError: a rank was lost.
    """
    found = list(variables)
    members = own_set_id(process_set, "broadcast_variables")
    check_root(root_rank, basics.size(), raw.ranks_of(members))
    checked = None
    if tf.executing_eagerly():
        described = [(tuple(variable.shape), tf.as_dtype(variable.dtype).name) for variable in found]
        objects.check_variables(described, process_set)
        names = [f"broadcast.variable.{number}" for number in range(len(found))]
    else:
        checked = _same_number(len(found), root_rank, members)
        names = [naming.in_graph("broadcast", f"variable.{number}") for number in range(len(found))]
    assigned = [
        variable.assign(raw.broadcast(raw.tensors([variable])[0], root_rank, name, members, checked))
        for variable, name in zip(found, names, strict=True)
    ]
    if tf.executing_eagerly():
        return None
    if not found:
        # Where no variable takes the check's result, a rank without variables would not run it.
        assigned = [ordering.use(checked)]
    return tf.group(*[update for update in assigned if update is not None]) if ops.in_tf1_graph() else None


def _same_number(number: int, root_rank: int, members: int) -> Any:
    """Return a tensor that fails on all ranks where they have different numbers of variables.

    Without it the ranks with more variables would wait for the others. It is a broadcast of one element per variable,
    so that the engine's error says which ranks have how many, and of one more, because TensorFlow drops an operation
    whose result has no elements: a rank without variables would not take part.
    """
    name = naming.in_graph("broadcast", "one element per variable and one more")
    return raw.broadcast(tf.zeros([number + 1], tf.int64), root_rank, name, members)


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that overwrites all global variables of a TF1 graph with the root's.

    Raises:
        RuntimeError: there is no graph, because TensorFlow runs eagerly.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() was found in eager execution, where there are no global variables; call "
            "broadcast_variables(model.variables, root_rank) once they are made, or for Keras use "
            "BroadcastGlobalVariablesCallback"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook of TF1's monitored sessions: overwrites all global variables with the root's when a session begins.

    Args:
        root_rank: whose values they are.
        device: not used.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank; on the root, the object itself. Not inside ``tf.function``.

    Args:
        obj: anything that cloudpickle takes; read on the root only.
        root_rank: whose object it is.
        session: not used.
        name: name of the operation, for messages; the same on all ranks.
        process_set: the ranks that take part, by default all; this is one of them.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns :func:`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in rank order. Not inside ``tf.function``.

    Args:
        obj: anything that cloudpickle takes.
        session: not used.
        name: name of the operation, for messages; the same on all ranks.
        process_set: the ranks that take part, by default all; this is one of them.
    """
    return objects.allgather_object(obj, name, process_set)
