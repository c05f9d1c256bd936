"""Top-k and PowerSGD: what was left out comes later, all ranks have the same bits, and less travels."""

from __future__ import annotations

import copy
import io
import pickle
import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from sparkvod.errors import MismatchError
from tests.contracts.worlds import Suite
from tests.torch.models import data, loss_of, mlp

KINDS = ("topk", "topk_bf16", "powersgd", "powersgd_fp16", "powersgd_later")


def join() -> None:
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def made(kind: str) -> Any:
    import sparkvod.torch as hvd

    compression = hvd.Compression
    return {
        "topk": compression.topk(0.1),
        "topk_bf16": compression.chain(compression.topk(0.1), compression.bf16),
        "powersgd": compression.powersgd(2),
        "powersgd_fp16": compression.chain(compression.powersgd(2), compression.fp16),
        "powersgd_later": compression.powersgd(2, start_step=3),
    }[kind]


def wrapped(model: nn.Module, compression: Any, lr: float = 0.05, momentum: float = 0.0, **options: Any) -> Any:
    import sparkvod.torch as hvd

    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, **options)


def bits(model: nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def step(model: nn.Module, optimizer: Any, number: int, rows: int = 8) -> None:
    import sparkvod.torch as hvd

    optimizer.zero_grad()
    loss_of(model, *data(rows, seed=100 * number + hvd.rank())).backward()
    optimizer.step()


def check_nothing_is_lost() -> None:
    """What arrives in all steps, and what each rank keeps, are together what the ranks computed."""
    import sparkvod.torch as hvd

    n = hvd.size()
    if n == 1:
        return
    for kind in KINDS:
        for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / n)):
            model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8, bias=False))
            optimizer = wrapped(model, made(kind), lr=0.0, op=op)
            computed = [torch.zeros_like(parameter) for parameter in model.parameters()]
            arrived = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for number in range(6):
                gradients = [
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * number + 10 * hvd.rank() + k))
                    for k, p in enumerate(model.parameters())
                ]
                optimizer.zero_grad()
                sum((p * g).sum() for p, g in zip(model.parameters(), gradients, strict=True)).backward()
                optimizer.step()
                for total, gradient in zip(computed, gradients, strict=True):
                    total += gradient
                for total, parameter in zip(arrived, model.parameters(), strict=True):
                    total += parameter.grad
            left = optimizer.compression_state()["errors"]
            for (name, _), mine, got in zip(model.named_parameters(), computed, arrived, strict=True):
                expected = hvd.allreduce(mine - left[name], op=hvd.Sum) * scale
                coarse = "16" in kind
                torch.testing.assert_close(got, expected, atol=0.05 if coarse else 1e-4, rtol=0.01 if coarse else 1e-4)
                assert kind.startswith("powersgd") or left[name].count_nonzero() > 0


def check_all_ranks_have_the_same_bits() -> None:
    import sparkvod.torch as hvd

    for kind in KINDS:
        several = ({}, {"backward_passes_per_step": 2}, {"groups": 2}, {"op": hvd.Sum})
        for options in several if kind in ("topk_bf16", "powersgd") else ({},):
            model = mlp()
            optimizer = wrapped(model, made(kind), lr=0.01, momentum=0.9, **options)
            for number in range(4):
                optimizer.zero_grad()
                for half in range(options.get("backward_passes_per_step", 1)):
                    loss_of(model, *data(4, seed=10 * number + half + 100 * hvd.rank())).backward()
                optimizer.step()
            assert len(set(hvd.allgather_object(bits(model)))) == 1, (kind, options)
            assert bits(model) != bits(mlp())


def check_convergence() -> None:
    """With what was left out fed back, a regression ends near where it ends uncompressed."""
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return
    kinds = KINDS if hvd.size() == 2 else ("topk_bf16", "powersgd")
    torch.manual_seed(7)
    truth = torch.randn(24, 12)
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(hvd.rank()))
    ends = {}
    for kind in ("none", *kinds):
        torch.manual_seed(1)
        model = nn.Linear(24, 12)
        optimizer = wrapped(model, hvd.Compression.none if kind == "none" else made(kind))
        for _ in range(100):
            optimizer.zero_grad()
            loss_of(model, x, x @ truth).backward()
            optimizer.step()
        ends[kind] = loss_of(model, x, x @ truth).item()
    begin = loss_of(nn.Linear(24, 12), x, x @ truth).item()
    assert ends["none"] < 1e-3 * begin
    for kind in kinds:
        assert ends[kind] < 1e-2 * begin, (kind, begin, ends)


def check_less_travels() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return

    def sent() -> int:
        # What a rank hands over: an allreduce's bytes are its own, an allgather's are all ranks'.
        found = 0
        for key, each in hvd.stats()["collectives"].items():
            found += each["bytes"] // (hvd.size() if key.startswith("allgather") else 1)
        return found

    travelled = {}
    for kind in ("none", *KINDS):
        model = nn.Linear(256, 128, bias=False)
        optimizer = wrapped(model, hvd.Compression.none if kind == "none" else made(kind))
        for number in range(2):
            before = sent()
            optimizer.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            if number == 1:  # agreed in the first
                travelled[kind] = sent() - before
    whole = 4 * 256 * 128
    assert whole <= travelled["none"] < 1.01 * whole
    assert 0.9 * 0.2 * whole < travelled["topk"] < 0.22 * whole  # a tenth of the values, and their places
    assert travelled["topk_bf16"] < 0.16 * whole
    assert travelled["powersgd"] < 0.03 * whole  # 2 * (256 + 128) of 32768 elements
    assert travelled["powersgd_fp16"] < 0.02 * whole
    assert travelled["powersgd_later"] >= whole


def check_it_travels_while_the_backward_pass_goes_on() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return

    def calls() -> int:
        return sum(each["calls"] for each in hvd.stats()["collectives"].values())

    class Late(torch.autograd.Function):
        """Lets the backward pass go on when something was exchanged."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            deadline = time.monotonic() + 10
            while calls() == began and time.monotonic() < deadline:
                time.sleep(0.01)
            exchanged.append(calls() > began)
            return grad

    for kind in ("topk", "powersgd"):
        first, last = nn.Linear(32, 32), nn.Linear(32, 32)
        optimizer = wrapped(nn.Sequential(first, last), made(kind))
        exchanged: list[bool] = []
        began = -1  # in the first step nothing is sent before the ranks have agreed
        for number in range(2):
            optimizer.zero_grad()
            loss = last(Late.apply(first(torch.ones(1, 32)))).sum()
            hvd.barrier()
            began = calls() if number else -1
            loss.backward()
            optimizer.step()
        assert exchanged == [True, True]


def check_gradients_that_ranks_do_not_have() -> None:
    import sparkvod.torch as hvd

    n, rank = hvd.size(), hvd.rank()
    if n == 1:
        return
    for kind in ("topk", "powersgd", "powersgd_later"):
        layers = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("all", "last", "none")})
        optimizer = wrapped(layers, made(kind), lr=0.0, op=hvd.Sum)
        for number in range(3):
            optimizer.zero_grad()
            out = layers["all"](torch.ones(1, 16)).sum() * (rank + 1)
            if rank == n - 1:
                out = out + layers["last"](torch.ones(1, 16)).sum()
            if number == 1 and rank == 0:
                out.detach_()  # no gradients at all
            else:
                out.backward()
            optimizer.step()
            assert layers["none"].weight.grad is None
            assert layers["last"].weight.grad is not None
        assert layers["none"].weight.grad is None
        # This rank had it never and keeps nothing of it.
        if rank < n - 1:
            assert not optimizer.compression_state()["errors"]["last.weight"].any()


def check_saved_and_loaded() -> None:
    """A run that goes on from a state_dict makes the same bits as one without a pause."""
    import sparkvod.torch as hvd

    for kind in ("topk_bf16", "powersgd", "powersgd_later"):
        model = mlp()
        optimizer = wrapped(model, made(kind), lr=0.01, momentum=0.9)
        for number in range(2):
            step(model, optimizer, number)
        saved = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), saved)
        copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
        again = mlp(seed=3)
        other = wrapped(again, made(kind), lr=0.9, momentum=0.9)
        step(again, other, 7)
        saved.seek(0)
        weights, state = torch.load(saved)
        again.load_state_dict(weights)
        other.load_state_dict(state)
        plain = torch.optim.SGD(again.parameters(), lr=0.1)
        plain.load_state_dict(state)  # what a plain optimizer does not know of it leaves out
        for each_model, each in ((model, optimizer), (again, other), *copies):
            for number in range(2, 6):
                step(each_model, each, number)
            assert bits(each_model) == bits(model), kind
        if hvd.size() == 1:
            assert optimizer.compression_state()["errors"] == {}
            continue
        # Rank 0's state for all: its errors are its own.
        common = hvd.broadcast_object(optimizer.state_dict(), root_rank=0)
        own = optimizer.compression_state()
        optimizer.load_state_dict(common)
        loaded = optimizer.compression_state()
        assert any(bool(error.any()) for error in loaded["errors"].values()) == (hvd.rank() == 0)
        assert loaded["steps"] == own["steps"] == 6
        with pytest.raises(ValueError, match="without rank, errors was found.*compression_state"):
            optimizer.load_compression_state({"size": 2, "steps": 1, "factors": {}})
        optimizer.load_compression_state(own)
        torch.testing.assert_close(optimizer.compression_state(), own, rtol=0, atol=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert hvd.rank() == 0 or not any(e.any() for e in optimizer.compression_state()["errors"].values())
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict())
        assert optimizer.compression_state()["steps"] == 0


def check_not_finite() -> None:
    """A gradient that overflowed is told of on all ranks, once."""
    import sparkvod.torch as hvd

    n = hvd.size()
    if n == 1:
        return
    for kind in KINDS:
        model = nn.Linear(32, 32)
        optimizer = wrapped(model, made(kind), lr=0.0)
        for number, factor in enumerate((1.0, torch.nan, torch.inf, 1.0, 1.0)):
            optimizer.zero_grad()
            (model(torch.ones(1, 32)).sum() * (factor if hvd.rank() == n - 1 else 1.0)).backward()
            optimizer.step()
            finite = [bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters()]
            assert finite == [number not in (1, 2)] * 2, (kind, number)


def check_dtypes_and_memory_formats() -> None:
    import sparkvod.torch as hvd

    for kind in KINDS:
        model = nn.Module()
        model.p16 = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
        model.p64 = nn.Parameter(torch.ones(16, 16, dtype=torch.float64))
        model.channels_last = nn.Parameter(torch.ones(4, 8, 3, 3).to(memory_format=torch.channels_last))
        model.scalar = nn.Parameter(torch.ones(()))
        model.empty = nn.Parameter(torch.ones(0, 3))
        optimizer = wrapped(model, made(kind), lr=0.0)
        for _ in range(40 if kind.startswith("topk") else 4):
            optimizer.zero_grad()
            sum((p.double() * (k + 1)).sum() for k, p in enumerate(model.parameters())).backward()
            optimizer.step()
        for k, parameter in enumerate(model.parameters()):
            assert parameter.grad.dtype is parameter.dtype
            assert parameter.grad.stride() == parameter.stride()
            mean = parameter.grad.double().mean().item() if parameter.numel() else k + 1
            assert kind.startswith("topk") or abs(mean - (k + 1)) < 0.02
        assert len(set(hvd.allgather_object(pickle.dumps(model.p64.grad.tolist())))) == 1


def check_sparse_frozen_added_and_closures() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return
    for kind in ("topk", "powersgd"):
        table = nn.Embedding(10, 8, sparse=True)
        optimizer = wrapped(table, made(kind), sparse_as_dense=True)
        table(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
        assert table.weight.grad.layout is torch.strided
        model = mlp()
        model[0].weight.requires_grad_(False)
        optimizer = wrapped(model, made(kind))
        step(model, optimizer, 0)
        model[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(9, 9))]})
        for number in (1, 2):
            step(model, optimizer, number)
        assert model[0].weight.grad.any()
        state = copy.deepcopy(optimizer.state_dict())
        assert len(state["compression"]["errors"]) == 7
        optimizer.step(lambda model=model: loss_of(model, *data(4)).backward())
        if hvd.rank() == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        optimizer.zero_grad()
        loss_of(model, *data(4)).backward()
        with pytest.raises(MismatchError, match="rank 1 has"):
            optimizer.step()
        hvd.barrier()


def check_who_differs_is_named() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return
    optimizer = wrapped(mlp(), hvd.Compression.topk(0.2 if hvd.rank() == 1 else 0.1))
    with pytest.raises(MismatchError, match=r"compression: .*TopK\(ratio=0.1\).*rank 1 has TopK\(ratio=0.2\)"):
        optimizer.step()


def check_another_process_set_and_world() -> None:
    import sparkvod.torch as hvd

    if hvd.size() < 3:
        return
    members = hvd.add_process_set([0, 2])
    model, optimizer, kept = mlp(), None, None
    if members.included():
        optimizer = wrapped(model, made("topk"), process_set=members)
        for number in range(3):
            step(model, optimizer, number)
        assert len(set(hvd.allgather_object(bits(model), process_set=members))) == 1
        kept = optimizer.compression_state()
        assert (kept["rank"], kept["size"]) == (members.rank(), 2)
    hvd.barrier()
    hvd.shutdown()
    if optimizer is not None:  # what it keeps can still be saved
        torch.testing.assert_close(optimizer.compression_state(), kept, rtol=0, atol=0)
    hvd.init()
    hvd.add_process_set(members)
    if members.included():
        optimizer._exchange.attach()
        torch.testing.assert_close(optimizer.compression_state(), kept, rtol=0, atol=0)
        step(model, optimizer, 4)
    hvd.barrier()


def check_arguments() -> None:
    import sparkvod.torch as hvd

    tensor = torch.ones(3)
    for call in (
        lambda compression: hvd.allreduce(tensor, compression=compression),
        lambda compression: hvd.grouped_allreduce([tensor], compression=compression),
        lambda compression: hvd.reducescatter(tensor, compression=compression),
    ):
        with pytest.raises(TypeError, match="compression=5 was found"):
            call(5)
        with pytest.raises(ValueError, match="DistributedOptimizer"):
            call(hvd.Compression.topk(0.5))
    with pytest.raises(TypeError, match="compression=5 was found"):
        wrapped(mlp(), 5)
    both = hvd.Compression.chain(hvd.Compression.bf16, hvd.Compression.none)
    assert hvd.allreduce(tensor, compression=both, op=hvd.Average).tolist() == [1.0] * 3
    twice = hvd.Compression.chain(hvd.Compression.bf16, hvd.Compression.fp16)
    assert hvd.allreduce(tensor, compression=twice, op=hvd.Average).tolist() == [1.0] * 3
    model = mlp()
    optimizer = wrapped(model, twice)
    step(model, optimizer, 0)
    assert optimizer.compression_state() is None
    assert "compression" not in optimizer.state_dict()


CHECKS = [check for name, check in globals().copy().items() if name.startswith("check_")]
SUITE = Suite(
    CHECKS,
    setup=join,
    env={"SPARKVOD_COLLECTIVE_TIMEOUT": "30", "SPARKVOD_BUCKET_BYTES": "2048", "SPARKVOD_FIRST_BUCKET_BYTES": "256"},
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_lossy(check: str, size: int) -> None:
    SUITE.verify(check, size)
