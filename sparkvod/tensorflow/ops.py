"""Collectives on TensorFlow's tensors, eager and inside ``tf.function``.

All of them take ``name``, the same on all ranks, which messages show, and may be left out. Outside ``tf.function``
they raise sparkvod's own errors: ``ValueError`` for what the caller did wrong, ``HorovodInternalError`` when the
collective failed. Inside, TensorFlow raises its own, with the same text; see ``sparkvod.tensorflow.own_errors``.

The ops run on the CPU: tensors of a GPU are copied by TensorFlow. ``device_dense``, ``device_sparse`` and
``ignore_name_scope`` are taken for compatibility and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparkvod.core import basics, collectives
from sparkvod.core.compression import check_compressor
from sparkvod.core.ops import Average, Sum, allreduce_op, check_root, check_rows, reducescatter_op, set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.tensorflow import naming, raw
from sparkvod.tensorflow.compression import Compression

# AutoGraph would convert these functions too, to the same ones.
as_written = tf.autograph.experimental.do_not_convert


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns the tensor reduced over the ranks. Differentiable for sums and averages.

    Args:
        tensor: a tensor or variable of the same shape and dtype on all ranks, or ``tf.IndexedSlices``: these are
            gathered, values and indices, and divided by the number of ranks for an average.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``.
        device_dense: not used.
        device_sparse: not used.
        compression: what the tensor is sent as.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``; for slices one of the first two.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        name: name of the operation, the same on all ranks.
        process_set: among which ranks; by default among all.
        ignore_name_scope: not used.
    """
    reduce_op = allreduce_op(op, average)
    members = set_id(process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, reduce_op, name, prescale_factor, postscale_factor, compression, process_set)
    scales = prescale_factor, postscale_factor
    return _reduced([tensor], reduce_op, *scales, compression, name, "allreduce", members)[0]


def _allreduce_slices(
    slices: tf.IndexedSlices,
    op: int,
    name: str | None,
    prescale: float,
    postscale: float,
    compression: Any,
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    if op not in (Average, Sum):
        raise ValueError(
            "an allreduce of tf.IndexedSlices by another operation was found, Average or Sum was expected; "
            "make it dense by tf.convert_to_tensor"
        )
    if (prescale, postscale) != (1.0, 1.0):
        raise ValueError(
            f"factors {prescale} and {postscale} were found with tf.IndexedSlices, 1 was expected; make it dense by "
            "tf.convert_to_tensor, or pass sparse_as_dense=True"
        )
    check_compressor(compression)
    values, context = compression.compress(tf.convert_to_tensor(slices.values))
    gathered, indices = grouped_allgather([values, slices.indices], name, process_set=process_set)
    values = compression.decompress(gathered, context)
    if op == Average:
        number = size_op() if set_id(process_set) == 0 else len(raw.ranks_of(set_id(process_set)))
        values = values / tf.cast(number, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _reduced(
    tensors: Sequence[Any],
    op: int,
    prescale: float,
    postscale: float,
    compression: Any,
    name: str | None,
    kind: str,
    members: int,
) -> list[Any]:
    check_compressor(compression)
    pairs = [compression.compress(tensor) for tensor in raw.tensors(tensors)]
    sent = [tensor for tensor, _ in pairs]
    reduced = naming.run(
        kind, name, sent[0], lambda name: raw.allreduce(sent, name, op, prescale, postscale, members), members
    )
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """As :func:`allreduce`, for a list of tensors that are reduced as one unit; slices in it are reduced singly."""
    reduce_op = allreduce_op(op, average)
    members = set_id(process_set)
    results: list[Any] = [None] * len(tensors)
    dense = []
    for k, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            sub_name = name and f"{name}.{k}"
            results[k] = _allreduce_slices(
                tensor, reduce_op, sub_name, prescale_factor, postscale_factor, compression, process_set
            )
        else:
            dense.append(k)
    if dense:
        group = [tensors[k] for k in dense]
        scales = prescale_factor, postscale_factor
        reduced = _reduced(group, reduce_op, *scales, compression, name, "grouped_allreduce", members)
        for k, tensor in zip(dense, reduced, strict=True):
            results[k] = tensor
    return results


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the ranks' tensors, one behind the other along the first dimension. Differentiable.

    Args:
        tensor: of any dtype that the engine knows; all dimensions but the first are the same on all ranks. A scalar
            counts as one row.
        name: name of the operation, the same on all ranks.
        ignore_name_scope: not used.
        process_set: among which ranks; by default among all.
    """
    members = set_id(process_set)
    return _gathered([tensor], name, "allgather", members)[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As :func:`allgather`, for a list of tensors that are gathered as one unit."""
    members = set_id(process_set)
    return _gathered(tensors, name, "grouped_allgather", members)


def _gathered(tensors: Sequence[Any], name: str | None, kind: str, members: int) -> list[Any]:
    sent = [tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor for tensor in raw.tensors(tensors)]
    return naming.run(kind, name, sent[0], lambda name: raw.allgather(sent, name, members)[0], members)


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's tensor. Differentiable.

    Args:
        tensor: of any dtype that the engine knows, of the same shape and dtype on all ranks.
        root_rank: whose tensor it is.
        name: name of the operation, the same on all ranks.
        ignore_name_scope: not used.
        process_set: among which ranks; by default among all.
    """
    members = set_id(process_set)
    check_root(root_rank, basics.size(), raw.ranks_of(members))
    (sent,) = raw.tensors([tensor])
    return naming.run("broadcast", name, sent, lambda name: raw.broadcast(sent, root_rank, name, members), members)


@as_written
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Sequence[Any]:
    """Overwrite variables with the root's values and return them.

    In a TF1 graph the result is the list of the overwritten values; a session that evaluates them overwrites the
    variables.
    """
    updates = []
    for number, variable in enumerate(variables):
        sub_name = name and f"{name}.{number}"
        updates.append(variable.assign(broadcast(variable, root_rank, sub_name, process_set=process_set)))
    return updates if in_tf1_graph() else variables


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows to each rank and returns what came from each. Differentiable.

    Args:
        tensor: of any dtype that the engine knows; the dimensions behind the first are the same on all ranks.
        splits: how many rows go to each rank, a list or a 1-D tensor of integers; together at most the tensor's.
            None: the tensor's rows, which must divide evenly, in equal parts.
        name: name of the operation, the same on all ranks.
        ignore_name_scope: not used.
        process_set: among which ranks; by default among all.

    Returns:
        The received rows in the order of the ranks; with ``splits`` the pair of these and an int32 tensor that says
        how many came from each rank.
    """
    members = set_id(process_set)
    (sent,) = raw.tensors([tensor])
    check_rows(sent.shape.rank, "alltoall", "use tf.reshape")
    rows = tf.zeros([0], tf.int64) if splits is None else _splits(splits)
    received, counts = naming.run("alltoall", name, sent, lambda name: raw.alltoall(sent, rows, name, members), members)
    return received if splits is None else (received, tf.cast(counts, tf.int32))


def _splits(splits: Any) -> Any:
    found = tf.convert_to_tensor(splits)
    if found.dtype not in (tf.int32, tf.int64) or found.shape.rank not in (1, None) or found.shape == (0,):
        raise ValueError(
            f"splits of {found.dtype.name} and shape {found.shape} were found, int32 or int64 in one dimension, one "
            f"for each of {basics.size()} ranks, were expected"
        )
    return tf.cast(found, tf.int64)


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int | None = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of what the ranks' tensors are reduced to. Differentiable for sums and averages.

    Args:
        tensor: of the same shape and dtype on all ranks, with at least one dimension. Of ``n`` rows each rank gets
            ``n // size()``, and the first ``n % size()`` ranks one more.
        device_dense: not used.
        compression: what the tensor is sent as.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        name: name of the operation, the same on all ranks.
        process_set: among which ranks; by default among all.
        ignore_name_scope: not used.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
    """
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, prescale_factor, postscale_factor, name
    )[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """As :func:`reducescatter`, for a list of tensors that are reduced as one unit."""
    reduce_op = reducescatter_op(op)
    members = set_id(process_set)
    check_compressor(compression)
    pairs = [compression.compress(tensor) for tensor in raw.tensors(tensors)]
    sent = [tensor for tensor, _ in pairs]
    for tensor in sent:
        check_rows(tensor.shape.rank, "reducescatter", "use tf.reshape")
    scattered = naming.run(
        "reducescatter",
        name,
        sent[0],
        lambda name: raw.reducescatter(sent, name, reduce_op, prescale_factor, postscale_factor, members),
        members,
    )
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(scattered, pairs, strict=True)]


@as_written
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Returns when all ranks have called it; inside ``tf.function`` it keeps its place among variables' updates.

    In a TF1 graph the result is the operation that waits.
    """
    members = set_id(process_set)
    done = naming.run("barrier", None, None, lambda name: raw.barrier(name, members), members)
    return done if in_tf1_graph() else None


def join(device: int = -1, average_over: str = "all") -> int:
    """Says that this rank has no more to do, and returns when all ranks have said so. Not inside ``tf.function``.

    Meanwhile it takes part in what the others go on with, eagerly or in functions: it contributes the neutral element
    to reductions and no rows to gathers.

    Args:
        device: for compatibility; has no meaning.
        average_over: what averages are divided by meanwhile: "all", the number of ranks, or "active", the number of
            those that have not joined. The same on all ranks.

    Returns:
        The rank that joined last.
    """
    return collectives.join(average_over)


def in_tf1_graph() -> bool:
    """Returns whether a graph is being built that a session will run."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


@as_written
def rank_op(name: str | None = None) -> Any:
    """Returns this process's rank as an int32 tensor, read when it is evaluated."""
    return raw.world(0, name)


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns the number of ranks of a process set as an int32 tensor, read when it is evaluated.

    Args:
        process_set_id: the set's number; 0 is that of all ranks.
        name: name of the operation in the graph.
    """
    return raw.world(1, name) if process_set_id == 0 else raw.of_set(process_set_id, len, name)


@as_written
def local_rank_op(name: str | None = None) -> Any:
    """Returns this process's rank among those of its host as an int32 tensor, read when it is evaluated."""
    return raw.world(2, name)


@as_written
def local_size_op(name: str | None = None) -> Any:
    """Returns the number of ranks on this host as an int32 tensor, read when it is evaluated."""
    return raw.world(3, name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns 1 or 0 as an int32 tensor, read when it is evaluated: whether this rank is in the process set.

    Args:
        process_set_id: the set's number; 0 is that of all ranks.
        name: name of the operation in the graph.
    """
    if process_set_id == 0:
        return tf.constant(1, tf.int32, name=name)
    return raw.of_set(process_set_id, lambda ranks: int(basics.rank() in ranks), name)
