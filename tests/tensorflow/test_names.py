"""The names of the API that scripts written for Horovod use, their parameters in that order, and their defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.contracts.worlds import Suite
from tests.tensorflow.test_contract import QUIET

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")

COMPRESSION, SET = object(), object()  # Compression.none and the global process set, in any front end
DEVICES = {"device_dense": "", "device_sparse": ""}
SCALES = {"prescale_factor": 1.0, "postscale_factor": 1.0}
MUST: Any = inspect.Parameter.empty
GRADIENTS = {
    "compression": COMPRESSION,
    "sparse_as_dense": False,
    "op": 0,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
    "groups": None,
    "process_set": SET,
}

TENSORFLOW: dict[str, dict[str, Any]] = {
    "allreduce": {
        **{"tensor": MUST, "average": None, **DEVICES, "compression": COMPRESSION, "op": None, **SCALES},
        **{"name": None, "process_set": SET, "ignore_name_scope": False},
    },
    "grouped_allreduce": {
        **{"tensors": MUST, "average": None, **DEVICES, "compression": COMPRESSION, "op": None, **SCALES},
        **{"process_set": SET, "ignore_name_scope": False, "name": None},
    },
    "reducescatter": {
        **{"tensor": MUST, "device_dense": "", "compression": COMPRESSION, "op": 0, "name": None, "process_set": SET},
        **{"ignore_name_scope": False, **SCALES},
    },
    "grouped_reducescatter": {
        **{"tensors": MUST, "device_dense": "", "compression": COMPRESSION, "op": 0, "process_set": SET, **SCALES},
    },
    "allgather": {"tensor": MUST, "name": None, "ignore_name_scope": False, "process_set": SET},
    "grouped_allgather": {"tensors": MUST, "name": None, "ignore_name_scope": False, "process_set": SET},
    "broadcast": {"tensor": MUST, "root_rank": MUST, "name": None, "ignore_name_scope": False, "process_set": SET},
    "broadcast_": {"variables": MUST, "root_rank": MUST, "name": None, "process_set": SET},
    "alltoall": {"tensor": MUST, "splits": None, "name": None, "ignore_name_scope": False, "process_set": SET},
    "join": {},
    "size_op": {"process_set_id": 0, "name": None},
    "process_set_included_op": {"process_set_id": 0, "name": None},
    "rank_op": {"name": None},
    "local_rank_op": {"name": None},
    "local_size_op": {"name": None},
    "broadcast_variables": {"variables": MUST, "root_rank": MUST, "process_set": SET, "inplace": False},
    "broadcast_global_variables": {"root_rank": MUST},
    "BroadcastGlobalVariablesHook": {"root_rank": MUST, "device": ""},
    "broadcast_object_fn": {"root_rank": 0, "session": None, "name": None, "process_set": SET},
    "allgather_object": {"obj": MUST, "session": None, "name": None, "process_set": SET},
    "DistributedOptimizer": {
        **{"optimizer": MUST, "name": None, "use_locking": False, **DEVICES, "compression": COMPRESSION},
        **{"sparse_as_dense": False, "backward_passes_per_step": 1, "op": 0, "gradient_predivide_factor": 1.0},
        **{"average_aggregated_gradients": False, "num_groups": 0, "groups": None, "process_set": SET},
        **{"scale_local_gradients": True},
    },
    "DistributedGradientTape": {"gradtape": MUST, **DEVICES, **GRADIENTS, "scale_local_gradients": True},
    "PartialDistributedGradientTape": {
        **{"gradtape": MUST, **DEVICES, **GRADIENTS},
        **{"local_layers": None, "scale_local_gradients": True},
    },
    "SyncBatchNormalization": {"fused": False},
}

KERAS: dict[str, dict[str, Any]] = {
    "DistributedOptimizer": {
        **{"optimizer": MUST, "name": None, **DEVICES, "compression": COMPRESSION, "sparse_as_dense": False},
        **{"gradient_predivide_factor": 1.0, "op": 0, "backward_passes_per_step": 1},
        **{"average_aggregated_gradients": False, "num_groups": 0, "groups": None, "process_set": SET},
        **{"scale_local_gradients": True},
    },
    "PartialDistributedOptimizer": {"optimizer": MUST},
    "broadcast_global_variables": {"root_rank": MUST},
    "allreduce": {
        **{"value": MUST, "name": None, "average": None, **SCALES, "op": None, "compression": COMPRESSION},
    },
    "allgather": {"value": MUST, "name": None},
    "broadcast": {"value": MUST, "root_rank": MUST, "name": None},
    "reducescatter": {"value": MUST, "name": None, "op": 0},
    "load_model": {
        **{"filepath": MUST, "custom_optimizers": None, "custom_objects": None, "compression": COMPRESSION},
        **{"legacy_opts": False},
    },
}

CALLBACKS: dict[str, dict[str, Any]] = {
    "BroadcastGlobalVariablesCallback": {"root_rank": MUST, "device": "", "local_variables": None},
    "MetricAverageCallback": {"device": ""},
    "LearningRateScheduleCallback": {
        **{"initial_lr": MUST, "multiplier": MUST, "start_epoch": 0, "end_epoch": None, "staircase": True},
        **{"momentum_correction": True, "steps_per_epoch": None},
    },
    "LearningRateWarmupCallback": {
        **{"initial_lr": MUST, "warmup_epochs": 5, "momentum_correction": True, "steps_per_epoch": None, "verbose": 0},
    },
    "BestModelCheckpoint": {
        **{"monitor": "val_loss", "verbose": 0, "mode": "auto", "save_freq": "epoch", "save_weights_only": False},
    },
}

SHARED = (
    *("init", "shutdown", "is_initialized", "size", "rank", "local_size", "local_rank", "cross_size", "cross_rank"),
    *("is_homogeneous", "start_timeline", "stop_timeline", "mpi_threads_supported", "mpi_enabled", "gloo_enabled"),
    *("mpi_built", "gloo_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "nccl_built", "Average", "Sum"),
    *("Adasum", "Min", "Max", "Product", "ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    *("HorovodInternalError", "HostsUpdatedInterrupt", "Compression", "broadcast_object", "allgather_object"),
)


def _check(module: Any, expected: dict[str, dict[str, Any]], hvd: Any) -> None:
    for name, parameters in expected.items():
        found = list(inspect.signature(getattr(module, name)).parameters.values())
        for parameter, (wanted, default) in zip(found, parameters.items(), strict=False):
            assert parameter.name == wanted, name
            same = {COMPRESSION: (hvd.Compression.none, None), SET: (hvd.global_process_set,)}.get(default, (default,))
            assert any(parameter.default is value or parameter.default == value for value in same), (name, wanted)
        assert len(found) >= len(parameters), name
        # What is ours comes behind, and may be left out.
        for parameter in found[len(parameters) :]:
            assert parameter.default is not MUST or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def check_names() -> None:
    import keras

    import sparkvod.tensorflow as hvd

    assert not [name for name in SHARED if not hasattr(hvd, name)]
    assert sorted(set(hvd.__all__) - set(dir(hvd)) - {"SyncBatchNormalization"}) == []
    _check(hvd, TENSORFLOW, hvd)
    if not hasattr(keras, "config"):
        return
    import sparkvod.tensorflow.keras as hvd_keras

    assert not [name for name in SHARED if not hasattr(hvd_keras, name)]
    _check(hvd_keras, KERAS, hvd_keras)
    _check(hvd_keras.callbacks, CALLBACKS, hvd_keras)


SUITE = Suite([check_names], env=QUIET)


@pytest.mark.timeout(60)
def test_names() -> None:
    SUITE.verify("check_names", 1)
