"""Keras 3 on TensorFlow, PyTorch or JAX: ``import sparkvod.keras as hvd``."""

from __future__ import annotations

from typing import Any

from sparkvod.core.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    stats,
)
from sparkvod.core.objects import allgather_object, broadcast_object
from sparkvod.core.ops import Adasum, Average, Max, Min, Product, Sum
from sparkvod.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from sparkvod.core.timeline import start_timeline, stop_timeline, timeline_span
from sparkvod.errors import HorovodInternalError, HostsUpdatedInterrupt
from sparkvod.keras import backends, callbacks
from sparkvod.keras.collectives import (
    Compression,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from sparkvod.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from sparkvod.keras.synchronized import refuse_synchronized

_backend = backends.current()
#: ``with own_errors(): model.fit(...)`` raises sparkvod's errors where the backend wraps them in its own.
own_errors: Any = _backend.own_errors


def broadcast_variables(variables: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites Keras's variables with the root's values.

    Args:
        variables: in the same order on all ranks.
        root_rank: whose values they are, a rank of the world.
        process_set: the ranks that take part, by default all.

    Raises:
        MismatchError: the ranks' variables differ.
        ValueError: the root, or this rank, is none of the set's.
    """
    _backend.broadcast_variables(list(variables), root_rank, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Keras 3 knows no global variables, so this only says what to call.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"broadcast_global_variables({root_rank}) was found, but Keras 3 has no global variables; call "
        "broadcast_variables(model.variables, root_rank), or use callbacks.BroadcastGlobalVariablesCallback in fit"
    )


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model and makes its optimizer, with the state it was saved with, a distributed one.

    Args:
        filepath: a ``.keras`` file.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: further classes and functions by name.
        compression: of the optimizer's gradients.
        legacy_opts: for compatibility; Keras 3 has no legacy optimizers.
    """
    import keras

    known = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        refuse_synchronized(model)
        DistributedOptimizer(model.optimizer, compression=compression)
        # Keras has decided as for the optimizer that was saved.
        if model.jit_compile and not _backend.COMPILES:
            model.jit_compile = False
    return model


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "own_errors",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stats",
    "stop_timeline",
    "timeline_span",
]
