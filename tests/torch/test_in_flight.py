"""Gradients that a program touches, or that get other memory: the next step is right, or refused by name."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from tests.contracts.worlds import Suite
from tests.torch.models import Halved, data, loss_of, mlp
from tests.torch.test_optimizer import sgd


def join() -> None:
    import sparkvod.torch as hvd

    hvd.init()


def _pointed_elsewhere(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clone()


def _transposed(model: nn.Module) -> None:
    model.weight.grad = model.weight.grad.transpose(0, 1)  # the same memory in another order


def _viewed(model: nn.Module) -> None:
    model.weight.grad.data = model.weight.grad.data.transpose(0, 1)


CONVERSIONS = {
    "half and back": lambda model: model.half().float(),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "double and back": lambda model: model.double().float(),
    "to and back": lambda model: model.to(torch.float16).to(torch.float32),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "shared": lambda model: model.share_memory(),
    "data": _pointed_elsewhere,
    "transposed": _transposed,
    "transposed data": _viewed,
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
}


def check_converted_between_steps() -> None:
    import sparkvod.torch as hvd

    n, rank = hvd.size(), hvd.rank()
    x = torch.rand(1, 2, 2, 2, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.topk(1.0)):
        for name, convert in CONVERSIONS.items():
            for to_none, fused in ((True, True), (False, False)):
                torch.manual_seed(0)
                model = nn.Conv2d(2, 2, 2, bias=False)
                plain = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
                optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression, op=hvd.Sum)
                for step in range(4):
                    optimizer.zero_grad(set_to_none=to_none)
                    (model(x.to(model.weight.dtype)).sum() * (rank + 1)).backward()
                    optimizer.step()
                    gradient = model.weight.grad
                    expected = (x.expand(2, -1, -1, -1) * (n * (n + 1) / 2)).to(gradient.dtype)
                    same = {"atol": 0.05, "rtol": 0, "msg": lambda text, name=name: f"{name}: {text}"}
                    torch.testing.assert_close(gradient, expected, check_stride=False, **same)
                    if step == 1:
                        convert(model)


def check_converted_before_the_first_step_and_after() -> None:
    import sparkvod.torch as hvd

    n = hvd.size()
    for compression in (hvd.Compression.none, hvd.Compression.topk(1.0)):
        model = nn.Linear(2, 1, bias=False)
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression, op=hvd.Sum)
        model.double()
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(1, 2, dtype=torch.float64)).sum() * (1 + 1e-12)).backward()
            optimizer.step()
            expected = torch.full((1, 2), n * (1 + 1e-12), dtype=torch.float64)
            torch.testing.assert_close(model.weight.grad, expected, atol=1e-14, rtol=0)
        model.float()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.grad, torch.full((1, 2), float(n)))
        if n == 1:
            continue
        model = nn.Linear(2, 1, bias=False)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.double()
        with pytest.raises(ValueError, match=r"'weight' is torch.float64 and was torch.float32"):
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        model.float()
        model.weight.data = torch.ones(3, 2)
        optimizer.zero_grad()
        if compression is hvd.Compression.none:
            with pytest.raises(ValueError, match="'weight' has the shape"):
                model(torch.ones(1, 2)).sum().backward()


def check_in_flight() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return
    for compression in (hvd.Compression.none, hvd.Compression.bf16, Halved, hvd.Compression.topk(1.0)):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), compression)
        for to_none in (True, False):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, *data(4)).backward()
            first = next(model.parameters())
            assert first.grad.shape == first.shape
            assert first.grad.dtype is first.dtype
            assert "0.weight" in repr(first.grad)
            uses = {
                "data": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),
                "numpy": lambda p: p.grad.numpy(),
                "pointer": lambda p: p.grad.data_ptr(),
                "storage": lambda p: p.grad.untyped_storage(),
                "share": lambda p: p.grad.share_memory_(),
                "norm": lambda p: p.grad.norm(),
                "clip": lambda _, m=model: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
                "collective": lambda p: hvd.allreduce_(p.grad),
                "set": lambda p: p.grad.set_(torch.zeros_like(p)),
            }
            for use in uses.values():
                with pytest.raises(ValueError, match=r"the gradient of '\d\.\w+' is being reduced"):
                    use(first)
            optimizer.step()
            assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, *data(4)).backward()
            with pytest.raises(ValueError, match="is being reduced"):
                model.half()  # its first parameter is converted before the gradient is
            with pytest.raises(ValueError, match="was changed"):
                optimizer.step()
            model.float()
        bits = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
        assert all(theirs == bits[0] for theirs in bits)
        optimizer.zero_grad()
        loss_of(model, *data(4)).backward()
        optimizer.step()
        kept = model[0].weight.grad
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, *data(4)).backward()
        kept.mul_(2)  # a gradient of an earlier step, whose memory is the engine's again
        with (
            pytest.raises(ValueError, match=r"'0\.weight' was changed")
            if compression is hvd.Compression.none
            else (contextlib.suppress(ValueError))
        ):
            optimizer.step()
        # A program that drops its optimizer, or ends its world, meanwhile has its gradients back.
        optimizer.zero_grad()
        loss_of(model, *data(4)).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_BUCKET_BYTES": "1024", "SPARKVOD_FIRST_BUCKET_BYTES": "64"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_in_flight(check: str, size: int) -> None:
    SUITE.verify(check, size)
