"""The peer's collectives, sets and statistics of a world are there under its names, and take its arguments in order."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch

from tests.contracts.worlds import Suite

# What a call of the peer's may say, as its documentation has it: name=default, in order.
SCALED = "op=None prescale_factor=1.0 postscale_factor=1.0 process_set"
SCATTERED = "process_set prescale_factor=1.0 postscale_factor=1.0"
PEER = {
    "init": "comm=None process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "start_timeline": "file_path mark_cycles=False",
    "stop_timeline": "",
    **dict.fromkeys(("size", "rank", "local_size", "local_rank", "cross_size", "cross_rank", "is_homogeneous"), ""),
    **dict.fromkeys(("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"), ""),
    **dict.fromkeys(("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"), ""),
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce_async": f"tensor average=None name=None {SCALED}",
    "allreduce": f"tensor average=None name=None compression {SCALED}",
    "allreduce_async_": f"tensor average=None name=None {SCALED}",
    "allreduce_": f"tensor average=None name=None {SCALED}",
    "grouped_allreduce_async": f"tensors average=None name=None {SCALED}",
    "grouped_allreduce": f"tensors average=None name=None compression {SCALED}",
    "grouped_allreduce_async_": f"tensors average=None name=None {SCALED}",
    "grouped_allreduce_": f"tensors average=None name=None {SCALED}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather_async": "tensor name=None process_set",
    "allgather": "tensor name=None process_set",
    "grouped_allgather_async": "tensors name=None process_set",
    "grouped_allgather": "tensors name=None process_set",
    "broadcast_async": "tensor root_rank name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "broadcast_async_": "tensor root_rank name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "alltoall_async": "tensor splits=None name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "reducescatter_async": f"tensor name=None op=0 {SCATTERED}",
    "reducescatter": f"tensor name=None compression op=0 {SCATTERED}",
    "grouped_reducescatter_async": f"tensors name=None op=0 {SCATTERED}",
    "grouped_reducescatter": f"tensors name=None compression op=0 {SCATTERED}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "process_set",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": "obj root_rank=0 name=None process_set",
    "allgather_object": "obj name=None",
    "DistributedOptimizer": "optimizer named_parameters=None compression backward_passes_per_step=1 op=0 "
    "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set",
}


def test_the_peers_names_and_arguments() -> None:
    import sparkvod.torch as hvd

    for name, wanted in PEER.items():
        found = list(inspect.signature(getattr(hvd, name)).parameters.values())
        for at, argument in enumerate(wanted.split()):
            key, _, default = argument.partition("=")
            assert found[at].name == key, f"{name}: argument {at} is {found[at].name}, {key} was expected"
            # None is what stands for the average where the peer writes it out.
            assert not default or str(found[at].default) in (default, "None"), f"{name}: {key}={found[at].default}"
        for more in found[len(wanted.split()) :]:
            assert more.default is not inspect.Parameter.empty, f"{name}: {more.name} is not the peer's"
        assert name in hvd.__all__
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))
    assert hvd.global_process_set.process_set_id == 0
    for name in ("Compression", "HorovodInternalError", "HostsUpdatedInterrupt", "stats"):
        assert hasattr(hvd, name)


def join() -> None:
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def check_a_shape_that_no_request_may_have() -> None:
    """It is refused on the rank that asks, before the others hear of it and lose the world."""
    import sparkvod.torch as hvd

    for shape in ((0, 1 << 50), (0, 1 << 40, 1 << 20), (1 << 30, 0, 1 << 30)):
        with pytest.raises(ValueError, match="elements"):
            hvd.allgather(torch.empty(shape, dtype=torch.uint8))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_COLLECTIVE_TIMEOUT": "20"})


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_peer_names(check: str, size: int) -> None:
    SUITE.verify(check, size)
