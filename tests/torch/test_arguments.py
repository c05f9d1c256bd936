"""What no collective can take is refused in words before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch

from tests.contracts.worlds import Suite


def join() -> None:
    import sparkvod.torch as hvd

    hvd.init()


def check_names() -> None:
    import sparkvod.torch as hvd

    x = torch.ones(3)
    for call in (
        lambda name: hvd.allreduce(x, name=name),
        lambda name: hvd.allreduce_(x, name=name),
        lambda name: hvd.allreduce_async(x, name=name),
        lambda name: hvd.allreduce_async_(x, name=name),
        lambda name: hvd.grouped_allreduce([x], name=name),
        lambda name: hvd.allgather(x, name=name),
        lambda name: hvd.broadcast(x, 0, name=name),
        lambda name: hvd.broadcast_object(1, 0, name=name),
        lambda name: hvd.allgather_object(1, name=name),
    ):
        with pytest.raises(ValueError, match="UTF-8"):
            call("a\ud800")
        with pytest.raises(TypeError, match="name=5 was found, a string"):
            call(5)


def check_factors_roots_and_groups() -> None:
    import sparkvod.torch as hvd

    x = torch.ones(3)
    for factors in ({"prescale_factor": "a"}, {"postscale_factor": None}):
        with pytest.raises(TypeError, match="scale_factor=.* was found, a number was expected"):
            hvd.allreduce(x, **factors)
    for root in ("0", None, 0.0):
        with pytest.raises(TypeError, match="root_rank="):
            hvd.broadcast(x, root)
        with pytest.raises(TypeError, match="root_rank="):
            hvd.broadcast_object(1, root)
    with pytest.raises(ValueError, match="the same tensor was found twice"):
        hvd.grouped_allreduce_([x, x])
    assert [each.tolist() for each in hvd.grouped_allreduce([x, x])] == [[1.0] * 3] * 2
    assert x.tolist() == [1.0] * 3
    hvd.broadcast_parameters({1: x, "a": x.clone()}, 0)


def check_tensors_without_values_and_what_is_no_handle() -> None:
    import sparkvod.torch as hvd

    with pytest.raises(ValueError, match="a tensor on the device meta was found, one with values was expected"):
        hvd.allreduce(torch.empty(3, device="meta"))
    for wrong in (None, "1", [1], torch.ones(1)):
        with pytest.raises(TypeError, match=f"a {type(wrong).__name__} was found, a handle was expected"):
            hvd.synchronize(wrong)
        with pytest.raises(TypeError, match="the number that one _async call returned"):
            hvd.poll(wrong)
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    assert hvd.synchronize(handle).item() == hvd.size()
    assert hvd.synchronize(handle) is None
    assert hvd.poll(handle)


def check_empty() -> None:
    import sparkvod.torch as hvd

    for shape in ((-1,), (2, -1), (0, -1), (1 << 62,), (1 << 40, 1 << 40), (1 << 64,), ([1 << 61],)):
        with pytest.raises(ValueError, match="a shape of .* was found"):
            hvd.empty(*shape)
    for wrong in (1.5, "a", None):
        with pytest.raises(TypeError, match="a shape of .* was found, whole numbers"):
            hvd.empty(wrong)
    with pytest.raises(TypeError, match="dtype='float32'"):
        hvd.empty(3, dtype="float32")
    with pytest.raises(ValueError, match=r"a tensor of torch\.complex64 was found"):
        hvd.empty(0, dtype=torch.complex64)
    assert [tuple(hvd.empty(*shape).shape) for shape in ((), (0, 3), ([2, 3],), (torch.Size([2]),))] == [
        (),
        (0, 3),
        (2, 3),
        (2,),
    ]


def check_optimizer() -> None:
    import sparkvod.torch as hvd

    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (5, {}, "a int was found, a torch"),
        (plain, {"compression": 5}, "compression=5"),
        (plain, {"named_parameters": 5}, "named_parameters of type int"),
        (plain, {"backward_passes_per_step": "a"}, "backward_passes_per_step=a"),
        (plain, {"backward_passes_per_step": 1.5}, "backward_passes_per_step=1.5"),
        (plain, {"gradient_predivide_factor": float("nan")}, "gradient_predivide_factor=nan"),
        (plain, {"gradient_predivide_factor": "a"}, "gradient_predivide_factor=a"),
    )
    for optimizer, options, words in cases:
        with pytest.raises((TypeError, ValueError), match=words):
            hvd.DistributedOptimizer(optimizer, **options)
    with pytest.raises(TypeError, match="a int was found"):
        hvd.broadcast_optimizer_state(5, 0)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_COLLECTIVE_TIMEOUT": "20"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("check", SUITE.names)
def test_arguments(check: str, size: int) -> None:
    SUITE.verify(check, size)
