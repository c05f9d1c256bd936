"""SyncBatchNorm: outputs, statistics and gradients of one process on the joined batch, with any rows on any rank."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from tests.contracts.worlds import Suite

PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}
ROWS = ([3, 2, 4], [0, 5, 1], [4, 0, 0], [1, 1, 1])  # of up to three ranks


def join() -> None:
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def _parts(rows: list[int], dims: int, dtype: torch.dtype, ranks: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inner = [2, 3, 2][:dims]
    whole = torch.randn(sum(rows[:ranks]), 4, *inner, generator=generator, dtype=torch.float64) * 3 + 100
    return list(whole.to(dtype).split(rows[:ranks]))


def _compare(mine: Any, expected: Any, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(mine.double(), expected.double(), atol=tolerance * 10, rtol=tolerance)


def _verify(dims: int, dtype: torch.dtype, members: Any = None, **options: Any) -> None:
    import sparkvod.torch as hvd

    ranks, place = (hvd.size(), hvd.rank()) if members is None else (members.size(), members.rank())
    chosen = {} if members is None else {"process_set": members}
    torch.manual_seed(1)
    alone = PLAIN[dims](4, **options).double()
    if alone.affine:
        with torch.no_grad():
            alone.weight.uniform_(0.5, 2)
            alone.bias.uniform_(-1, 1)
    layer = hvd.SyncBatchNorm(4, **options, **chosen).to(dtype)
    layer.load_state_dict(alone.state_dict())
    for seed, rows in enumerate(ROWS):
        if sum(rows[:ranks]) * (dims > 0) + sum(rows[:ranks]) < 2:
            continue
        parts = _parts(rows, dims, dtype, ranks, seed)
        mine = parts[place].clone().requires_grad_()
        whole = torch.cat(parts).double().requires_grad_()
        factors = torch.cos(torch.arange(whole.numel(), dtype=torch.float64)).view(whole.shape)
        own_factors = factors.split(rows[:ranks])[place].to(dtype)
        for part in (*layer.parameters(), *alone.parameters()):
            part.grad = None
        output = layer(mine)
        (output * own_factors).sum().backward()
        expected = alone(whole)
        (expected * factors).sum().backward()
        assert output.dtype is dtype
        _compare(output, expected.split(rows[:ranks])[place], dtype)
        _compare(mine.grad, whole.grad.split(rows[:ranks])[place], dtype)
        for parameter, other in zip(layer.parameters(), alone.parameters(), strict=True):
            total = hvd.allreduce(parameter.grad.double(), op=hvd.Sum, **chosen)
            torch.testing.assert_close(total, other.grad, atol=TOLERANCES[dtype] * 60, rtol=TOLERANCES[dtype] * 10)
        for name, buffer in alone.named_buffers():
            _compare(dict(layer.named_buffers())[name], buffer, dtype)
    layer.eval()
    alone.eval()
    rows = _parts([2 + place, 2 + place, 2 + place], dims, dtype, 1, 9)[0]  # nothing is exchanged
    _compare(layer(rows), alone(rows.double()), dtype)


def check_shapes_and_dtypes() -> None:
    for dims in PLAIN:
        _verify(dims, torch.float64)
    _verify(2, torch.float32)
    _verify(1, torch.bfloat16)


def check_options() -> None:
    _verify(2, torch.float64, affine=False)
    _verify(2, torch.float64, track_running_stats=False)
    _verify(2, torch.float64, momentum=None, eps=1e-3)
    _verify(2, torch.float64, momentum=0.7)


def check_process_sets() -> None:
    import sparkvod.torch as hvd

    if hvd.size() < 3:
        return
    members = hvd.add_process_set([0, 2])
    if members.included():
        _verify(1, torch.float64, members)
    hvd.remove_process_set(members)


def check_errors() -> None:
    import sparkvod.torch as hvd

    layer = hvd.SyncBatchNorm(4)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layer(torch.ones(4))
    with pytest.raises(ValueError, match="has 4 features"):
        layer(torch.ones(2, 3))
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(torch.ones(int(hvd.rank() == 0), 4))
    assert layer(torch.ones(0, 4)).shape == (0, 4)
    assert int(layer.num_batches_tracked) == 0


def check_conversion() -> None:
    import sparkvod.torch as hvd
    from sparkvod.torch.sync_batch_norm import synchronise

    model = nn.Sequential(nn.Conv1d(1, 4, 1), nn.BatchNorm1d(4), nn.Sequential(nn.SyncBatchNorm(4), nn.ReLU())).eval()
    weight, state = model[1].weight, model.state_dict()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], hvd.SyncBatchNorm)
    assert isinstance(model[2][0], hvd.SyncBatchNorm)
    assert model[1].weight is weight
    assert not model[1].training
    assert list(model.state_dict()) == list(state)
    assert isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3)), hvd.SyncBatchNorm)
    theirs = nn.Sequential(nn.SyncBatchNorm(4), nn.BatchNorm1d(4))
    first = theirs[0]
    assert synchronise(theirs) == [first]
    assert type(theirs[1]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="module '0' is a Own"):
        synchronise(nn.Sequential(type("Own", (nn.SyncBatchNorm,), {})(4)))


def check_training_is_that_of_one_process() -> None:
    import sparkvod.torch as hvd

    rank, size = hvd.rank(), hvd.size()

    def model(kind: Any) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), kind(4), nn.Tanh(), nn.Linear(4, 1))

    mine, alone = model(hvd.SyncBatchNorm), model(nn.BatchNorm1d)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters(), op=hvd.Sum
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for seed, rows in enumerate(ROWS):
        x = torch.randn(sum(rows[:size]), 3, generator=torch.Generator().manual_seed(seed))
        if len(x) < 2:
            continue
        part = x.split(rows[:size])[rank]
        optimizer.zero_grad()
        (mine(part).square().sum() / len(x)).backward()
        optimizer.step()
        plain.zero_grad()
        alone(x).square().mean().backward()
        plain.step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, atol=1e-5, rtol=1e-5)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_sync_batch_norm(check: str, size: int) -> None:
    SUITE.verify(check, size)
