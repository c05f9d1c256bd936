"""The ops themselves, on lists of tensors, with their derivatives."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sparkvod.core import basics, ops
from sparkvod.tensorflow import library, naming, ordering
from sparkvod.tensorflow.errors import translated

_DTYPES = {tf.as_dtype(name) for name in ops.DTYPES}
_captured: Any = None


def tensors(values: Sequence[Any]) -> list[Any]:
    """Returns the values as tensors of dtypes that the engine knows.

    Raises:
        ValueError: a dtype has no code in the engine, or a tensor is ragged or sparse.
    """
    for value in values:
        _refuse_composite(value)
    converted = [tf.convert_to_tensor(value) for value in values]
    for tensor in converted:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"a tensor of {tensor.dtype.name} was found, one of {', '.join(ops.DTYPES)} was expected; cast it"
            )
    return converted


def _refuse_composite(value: Any) -> None:
    if isinstance(value, tf.RaggedTensor):
        kind, cure = "tf.RaggedTensor", "send its flat_values and row_splits, or value.to_tensor()"
    elif isinstance(value, tf.SparseTensor):
        kind, cure = "tf.SparseTensor", "send its values and indices by allgather, or tf.sparse.to_dense(value)"
    else:
        return
    raise ValueError(f"a collective takes dense tensors, got a {kind} of shape {value.shape}: {cure}")


def _token() -> Any:
    # What TensorFlow cannot foresee in a graph, so that it does not run the op while it optimises and keep the result:
    # in a function one of its arguments, for only smaller eager tensors (up to 128 elements) become constants there;
    # in a TF1 graph, branches and loops of it included, which are functions too, the time.
    global _captured
    if not _outermost_is_eager():
        return tf.cast(tf.timestamp(), tf.int64)
    if _captured is None:
        with tf.init_scope():
            _captured = tf.zeros([129], tf.int64)
    return _captured


def _outermost_is_eager() -> bool:
    if tf.executing_eagerly():
        return True
    with tf.init_scope():
        return tf.executing_eagerly()


def _bits(factor: float) -> int:
    (bits,) = struct.unpack("=q", struct.pack("=d", float(factor)))
    return bits


def ranks_of(process_set: int) -> list[int]:
    """Returns the sorted ranks of a registered process set."""
    return basics.world().ranks_of(process_set)


def _among(process_set: int) -> dict[str, Any]:
    ranks = ranks_of(process_set)
    return {"process_set": process_set, "ranks": ranks} if process_set else {}


def _called(op: str, *args: Any, token: Any = None, **attributes: Any) -> Any:
    function = getattr(library.load(), f"sparkvod_{op}")
    if tf.executing_eagerly():
        basics.engine()  # says that there is none
        try:
            return function(_token(), *args, **attributes)
        except tf.errors.OpError as error:
            own = translated(error)
            raise own from (None if own is not error else error.__cause__)
    result = function(_token() if token is None else token, *args, **attributes)
    if op not in ("barrier", "world") and tf.compat.v1.get_default_graph().building_function and _outermost_is_eager():
        ordering.end_after(tf.nest.flatten(result)[0])
    return result


def allreduce(
    values: Sequence[Any],
    name: str,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    after: Any = None,
) -> list[Any]:
    """Return the reduced tensors, one unit.

    Here and below, ``after`` is an int64 tensor that must exist before the operation runs in a graph: a result of
    another collective, or the first input of the one that is differentiated.
    """
    ops.check_scales(prescale, postscale)
    scales = {"prescale": _bits(prescale), "postscale": _bits(postscale)}
    return _called("allreduce", values, token=after, tensor_name=name, reduce_op=op, **scales, **_among(process_set))


def allgather(values: Sequence[Any], name: str, process_set: int = 0, after: Any = None) -> tuple[list[Any], Any]:
    """Returns the gathered tensors, and an int64 tensor of each one's and each rank's number of rows."""
    results, rows = _called("allgather", values, token=after, tensor_name=name, **_among(process_set))
    return [_by_rows(result, value) for result, value in zip(results, values, strict=True)], rows


def broadcast(value: Any, root_rank: int, name: str, process_set: int = 0, after: Any = None) -> Any:
    """Returns the root's tensor."""
    attributes = {"tensor_name": name, "root_rank": root_rank, **_among(process_set)}
    return _called("broadcast", [value], token=after, **attributes)[0]


def reducescatter(
    values: Sequence[Any], name: str, op: int, prescale: float = 1.0, postscale: float = 1.0, process_set: int = 0
) -> list[Any]:
    """Returns this rank's rows of the reduced tensors, one unit."""
    ops.check_scales(prescale, postscale)
    scales = {"prescale": _bits(prescale), "postscale": _bits(postscale)}
    results = _called("reducescatter", values, tensor_name=name, reduce_op=op, **scales, **_among(process_set))
    return [_by_rows(result, value) for result, value in zip(results, values, strict=True)]


def alltoall(value: Any, splits: Any, name: str, process_set: int = 0, after: Any = None) -> tuple[Any, Any]:
    """Returns what came from all ranks, and an int64 tensor of each rank's number of rows; no splits: equal ones."""
    results, rows = _called("alltoall", [value], splits, token=after, tensor_name=name, **_among(process_set))
    return _by_rows(results[0], value), rows


def barrier(name: str, process_set: int = 0) -> Any:
    """Ends when all ranks have called it."""
    return _called("barrier", tensor_name=name, **_among(process_set))


def world(what: int, name: str | None, after: Any = None) -> Any:
    """Returns a number of the current world as an int32 scalar, by its place in ``native/bindings/table.h``."""
    number = _called("world", token=after, what=what, name=name)
    if not tf.executing_eagerly():
        number.set_shape([])
    return number


def of_set(process_set: int, number: Callable[[list[int]], int], name: str | None) -> Any:
    """Returns a number of a process set's ranks as an int32 scalar, read when it is evaluated."""

    def now() -> np.ndarray:
        ranks = basics.world().process_sets.get(process_set)
        if ranks is None:
            raise ValueError(
                f"process_set_id={process_set} was found, that of a set of this world was expected; take it from the "
                "set that add_process_set() returns"
            )
        return np.array(number(ranks), np.int32)

    if tf.executing_eagerly():
        return tf.constant(now(), name=name)
    read = tf.numpy_function(now, [], tf.int32, name=name)
    read.set_shape([])
    return read


def _by_rows(result: Any, value: Any) -> Any:
    if not tf.executing_eagerly() and value.shape.rank:
        result.set_shape([None, *value.shape[1:]])
    return result


def _factor(op: Any, name: str) -> float:
    (factor,) = struct.unpack("=d", struct.pack("=q", op.get_attr(name)))
    return factor


def _set_of(op: Any) -> int:
    return int(op.get_attr("process_set"))


def _token_of(op: Any) -> Any:
    # The derivative of a loop cannot capture a token of its own, but what the loop has.
    return op.inputs[0]


def _differentiable(op: Any) -> int:
    code = int(op.get_attr("reduce_op"))
    ops.check_differentiable(code, "put tf.stop_gradient around it")
    return code


def _for_those_there(grads: Sequence[Any], call: Any) -> list[Any]:
    # Applies `call` to the list of the gradients that there are, and puts the results in their places.
    there = [k for k, grad in enumerate(grads) if grad is not None]
    placed: list[Any] = [None] * len(grads)
    if there:
        for k, result in zip(there, call([tf.convert_to_tensor(grads[k]) for k in there]), strict=True):
            placed[k] = result
    return placed


@tf.RegisterGradient("SparkvodAllreduce")
def _allreduce_gradient(op: Any, *grads: Any) -> list[Any]:
    code, name = _differentiable(op), naming.of_gradient(op)
    scales = _factor(op, "prescale"), _factor(op, "postscale")

    def reduced(there: list[Any]) -> list[Any]:
        return allreduce(there, name, code, *scales, _set_of(op), _token_of(op))

    return [None, *_for_those_there(grads, reduced)]


@tf.RegisterGradient("SparkvodAllgather")
def _allgather_gradient(op: Any, *grads: Any) -> list[Any]:
    # The average of the gradients over the ranks, of which each keeps its own rows.
    name, ranks = naming.of_gradient(op), ranks_of(_set_of(op))
    # Read when the graph runs: one rank may have saved it for all.
    rank = tf.reduce_sum(tf.cast(tf.less(ranks, world(0, None, _token_of(op))), tf.int32))

    def reduced(there: list[Any]) -> list[Any]:
        return allreduce(there, name, ops.Average, process_set=_set_of(op), after=_token_of(op))

    averaged = _for_those_there(grads[:-1], reduced)
    rows = tf.reshape(op.outputs[-1], [-1, len(ranks)])
    mine = []
    for k, grad in enumerate(averaged):
        if grad is not None:
            first = tf.reduce_sum(rows[k, :rank])
            grad = tf.reshape(grad[first : first + rows[k, rank]], tf.shape(op.inputs[1 + k]))
        mine.append(grad)
    return [None, *mine]


@tf.RegisterGradient("SparkvodBroadcast")
def _broadcast_gradient(op: Any, grad: Any) -> list[Any]:
    # On the root the average of the gradients over the ranks, elsewhere zero.
    if grad is None:
        return [None, None]
    name = naming.of_gradient(op)
    token = _token_of(op)
    (averaged,) = allreduce([tf.convert_to_tensor(grad)], name, ops.Average, process_set=_set_of(op), after=token)
    # The same graph on all ranks: where some multiplied by a constant zero, TensorFlow 2.13 would drop their allreduce,
    # and the root would wait for it.
    is_root = tf.equal(world(0, None, token), int(op.get_attr("root_rank")))
    return [None, tf.where(is_root, averaged, tf.zeros_like(averaged))]


@tf.RegisterGradient("SparkvodReducescatter")
def _reducescatter_gradient(op: Any, *grads: Any) -> list[Any]:
    # The allgather of the gradients; of a sum times the size, as in the peer.
    code, name = _differentiable(op), naming.of_gradient(op)
    scale = _factor(op, "prescale") * _factor(op, "postscale") * (len(ranks_of(_set_of(op))) if code == ops.Sum else 1)
    gathered = _for_those_there(grads, lambda there: allgather(there, name, _set_of(op), _token_of(op))[0])
    return [None, *(None if grad is None else grad * tf.cast(scale, grad.dtype) for grad in gathered)]


@tf.RegisterGradient("SparkvodAlltoall")
def _alltoall_gradient(op: Any, grad: Any, _: Any) -> list[Any]:
    # Back to where the rows came from; rows that were not sent have none.
    if grad is None:
        return [None, None, None]
    name = naming.of_gradient(op)
    back, _ = alltoall(tf.convert_to_tensor(grad), op.outputs[-1], name, _set_of(op), _token_of(op))
    shape = tf.shape(op.inputs[1])
    missing = tf.concat([shape[:1] - tf.shape(back)[:1], shape[1:]], 0)
    return [None, tf.concat([back, tf.zeros(missing, back.dtype)], 0), None]


tf.no_gradient("SparkvodBarrier")
tf.no_gradient("SparkvodWorld")
