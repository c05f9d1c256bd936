"""The TensorFlow front end: ``import sparkvod.tensorflow as hvd``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from sparkvod.core.ops import Adasum, Average, Max, Min, Product, Sum
from sparkvod.core.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from sparkvod.core.timeline import start_timeline, stop_timeline, timeline_span
from sparkvod.errors import HorovodInternalError, HostsUpdatedInterrupt
from sparkvod.tensorflow import library
from sparkvod.tensorflow.compression import Compression
from sparkvod.tensorflow.errors import own_errors
from sparkvod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from sparkvod.tensorflow.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from sparkvod.tensorflow.optimizer import DistributedOptimizer
from sparkvod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

if TYPE_CHECKING:
    from sparkvod.tensorflow.normalization import SyncBatchNormalization

# Says at import, rather than in the first collective, that this TensorFlow cannot hold the ops.
library.load()


def __getattr__(name: str) -> Any:
    # What needs Keras, which takes seconds to import.
    if name == "SyncBatchNormalization":
        return importlib.import_module("sparkvod.tensorflow.normalization").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
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
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "own_errors",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stats",
    "stop_timeline",
    "timeline_span",
]
