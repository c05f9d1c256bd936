"""DistributedOptimizer trains what one process would, on 1, 2 and 3 ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from tests.contracts.worlds import Suite
from tests.torch.models import Maker, assert_equal, data, loss_of, mlp, train_alone


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def join() -> None:
    import sparkvod.torch as hvd

    hvd.init()


def _shares(rows: int, step: int) -> list[slice]:
    # Uneven shares of a global batch; in step 1 the last rank has nothing, in step 2 only rank 0 has something.
    import sparkvod.torch as hvd

    n = hvd.size()
    weights = [rank + 1 + step for rank in range(n)]
    if step == 1 and n > 1:
        weights[-1] = 0
    if step == 2:
        weights = [1] + [0] * (n - 1)
    ends = [round(rows * sum(weights[: rank + 1]) / sum(weights)) for rank in range(n)]
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _train_by_rows(make: Maker, set_to_none: bool = True, **options: Any) -> None:
    import sparkvod.torch as hvd

    batches = [data(rows, seed) for seed, rows in enumerate((24, 23, 24, 24, 7, 24))]
    expected = train_alone(make, batches)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), op=hvd.Sum, **options)
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad(set_to_none=set_to_none)
        mine = _shares(len(x), step)[hvd.rank()]
        if mine.stop > mine.start:
            (loss_of(model, x[mine], y[mine]) * (len(x[mine]) / len(x))).backward()
        optimizer.step()
    assert_equal(model, expected)
    bits = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert all(theirs == bits[0] for theirs in bits)


def check_sgd_by_rows() -> None:
    _train_by_rows(sgd)


def check_adam_by_rows() -> None:
    _train_by_rows(adam)


def check_gradients_kept_as_zeros() -> None:
    _train_by_rows(sgd, set_to_none=False)


def check_groups() -> None:
    _train_by_rows(sgd, groups=2)
    _train_by_rows(sgd, groups=50)


def check_average() -> None:
    import sparkvod.torch as hvd

    for options in ({}, {"gradient_predivide_factor": 2.0}, {"groups": 3}):
        batches = [data(4 * hvd.size(), seed) for seed in range(5)]
        expected = train_alone(adam, batches)
        model = mlp()
        optimizer = hvd.DistributedOptimizer(adam(model.parameters()), **options)
        for x, y in batches:
            optimizer.zero_grad()
            mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
            loss_of(model, x[mine], y[mine]).backward()
            optimizer.step()
        assert_equal(model, expected)


def check_accumulation() -> None:
    import sparkvod.torch as hvd

    # Two backward passes per step; their sum is averaged over the ranks.
    batches = [data(8 * hvd.size(), seed) for seed in range(4)]
    expected = mlp()
    alone = sgd(expected.parameters())
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=2)
    for x, y in batches:
        alone.zero_grad()
        (2 * loss_of(expected, x, y)).backward()
        alone.step()
        optimizer.zero_grad()
        for half in range(2):
            begin = 8 * hvd.rank() + 4 * half
            loss_of(model, x[begin : begin + 4], y[begin : begin + 4]).backward()
        optimizer.step()
    assert_equal(model, expected)
    # One pass before step is fewer than allowed: it is reduced all the same.
    optimizer.zero_grad()
    loss_of(model, *data(4)).backward()
    optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    loss_of(model, *data(4)).backward()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
            loss_of(model, *data(4)).backward()
        optimizer.step()  # what the refused pass would have added has reached nobody
        bits = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
        assert all(theirs == bits[0] for theirs in bits)


def check_clipping() -> None:
    import sparkvod.torch as hvd

    x, y = data(4 * hvd.size())
    expected = mlp()
    alone = sgd(expected.parameters())
    loss_of(expected, x, y).backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    alone.step()
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    loss_of(model, x[mine], y[mine]).backward()
    optimizer.synchronize()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 0.1), norm)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_equal(model, expected)
    optimizer.zero_grad()
    loss_of(model, x[mine], y[mine]).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def check_closure() -> None:
    import sparkvod.torch as hvd

    x, y = data(4 * hvd.size())
    mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)

    expected, model = mlp(), mlp()
    alone, optimizer = make(expected.parameters()), hvd.DistributedOptimizer(make(model.parameters()))

    def loss_alone() -> torch.Tensor:
        alone.zero_grad()
        loss = loss_of(expected, x, y)
        loss.backward()
        return loss

    def loss_of_rank() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x[mine], y[mine])
        loss.backward()
        return hvd.allreduce(loss.detach())

    for _ in range(2):
        first = alone.step(loss_alone)
        torch.testing.assert_close(optimizer.step(loss_of_rank), first, atol=1e-5, rtol=1e-5)
    assert_equal(model, expected, atol=1e-4)
    # backward before step, a closure that only tells the loss
    expected, model = mlp(), mlp()
    alone, optimizer = sgd(expected.parameters()), hvd.DistributedOptimizer(sgd(model.parameters()))
    loss_of(expected, x, y).backward()
    alone.step()
    loss_of(model, x[mine], y[mine]).backward()
    assert optimizer.step(lambda: 17.0) == 17.0
    assert_equal(model, expected)


def check_compression() -> None:
    import sparkvod.torch as hvd

    class Halving:
        # No cast: sends half of the values, gives back the double.
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
            return tensor / 2, 2.0

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: float) -> torch.Tensor:
            return tensor * ctx

    class Subclass(hvd.Compression.none):
        compress = Halving.compress
        decompress = Halving.decompress

    batches = [data(4 * hvd.size(), seed) for seed in range(3)]
    expected = train_alone(sgd, batches)
    for compression, atol in (
        (hvd.Compression.fp16, 2e-3),
        (hvd.Compression.bf16, 2e-2),
        (Halving, 1e-5),
        (Subclass, 1e-5),
    ):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), compression=compression)
        for x, y in batches:
            optimizer.zero_grad()
            mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
            loss_of(model, x[mine], y[mine]).backward()
            optimizer.step()
        assert_equal(model, expected, atol)
        assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


def check_several_dtypes() -> None:
    import sparkvod.torch as hvd

    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).to(dtype)])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=1)
        rank = hvd.rank()
        (
            model[0](torch.ones(1, 4)).sum() * (rank + 1) + model[1](torch.ones(1, 4, dtype=dtype)).sum() * rank
        ).backward()
        optimizer.synchronize()
        n = hvd.size()
        torch.testing.assert_close(model[0].weight.grad, torch.full((4, 4), (n + 1) / 2))
        torch.testing.assert_close(model[1].weight.grad, torch.full((4, 4), (n - 1) / 2, dtype=dtype))


def check_loss_goes_down() -> None:
    import sparkvod.torch as hvd

    model = mlp(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x, y = data(16, seed=hvd.rank())
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
    assert losses[-1] < 0.7 * losses[0]
    assert not any(math.isnan(loss) for loss in losses)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
# Buckets of 1 KiB, so that this small model has several; and one bucket for all.
SUITES = {
    "small": Suite(CHECKS, setup=join, env={"SPARKVOD_BUCKET_BYTES": "1024", "SPARKVOD_FIRST_BUCKET_BYTES": "64"}),
    "default": Suite(CHECKS, setup=join),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("buckets", "size"), [("default", 1), ("default", 2), ("small", 2), ("small", 3)])
@pytest.mark.parametrize("check", SUITES["small"].names)
def test_optimizer(check: str, size: int, buckets: str) -> None:
    SUITES[buckets].verify(check, size)
