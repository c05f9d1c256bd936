"""torch.amp.GradScaler as in one process: what is not finite on one rank skips the step on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from tests.contracts.worlds import Suite
from tests.torch.models import assert_equal, mlp

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}
STEPS = 5
OVERFLOWS = 2  # in this step, on the last rank
ALONE = 3  # in this step only rank 0 has rows


def join() -> None:
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def _loss(model: nn.Module, step: int, rank: int, share: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + share))
    return model(x).square().mean()


def _train(make: Any, rank: int, size: int, how: str, passes: int, ranks: list[int], wrap: Any) -> Any:
    """Trains by a GradScaler; returns the model and the scales."""
    model = mlp()
    optimizer = wrap(make(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for share in range(passes):
            for mine in ranks:
                if step != ALONE or mine == 0 or how == "unscale":
                    factor = torch.inf if step == OVERFLOWS and mine == size - 1 else 1.0
                    scaler.scale(_loss(model, step, mine, share) * factor / size).backward()
        if how == "synchronize" and hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        if how != "step":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if how == "synchronize" and hasattr(optimizer, "synchronize"):
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def _verify(name: str, how: str, passes: int) -> None:
    import sparkvod.torch as hvd

    rank, size = hvd.rank(), hvd.size()

    def wrap(plain: torch.optim.Optimizer) -> Any:
        return hvd.DistributedOptimizer(plain, op=hvd.Sum, backward_passes_per_step=passes)

    make = OPTIMIZERS[name]
    expected, expected_scales = _train(make, 0, size, how, passes, list(range(size)), lambda plain: plain)
    model, scales = _train(make, rank, size, how, passes, [rank], wrap)
    assert scales == expected_scales, (name, how, scales, expected_scales)
    assert scales[OVERFLOWS] < scales[OVERFLOWS - 1]
    assert_equal(model, expected, atol=1e-4)
    bits = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
    assert all(theirs == bits[0] for theirs in bits), (name, how)


def check_step() -> None:
    for name in OPTIMIZERS:
        _verify(name, "step", 1)


def check_unscale_and_clip() -> None:
    for name in ("plain", "foreach"):
        _verify(name, "unscale", 1)


def check_synchronize_first() -> None:
    for name in ("plain", "fused"):
        _verify(name, "synchronize" if name == "plain" else "step", 1)


def check_several_passes() -> None:
    for how in ("step", "unscale", "synchronize"):
        _verify("foreach", how, 2)
    _verify("fused", "step", 2)


def check_gradients_of_some_ranks() -> None:
    import sparkvod.torch as hvd

    # Rank 0 alone has gradients of one layer, and of one dtype, and unscales by itself: the others' are unscaled too.
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).double()])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model[0](torch.ones(1, 2)).sum()
        if hvd.rank() == 0:
            loss = loss + model[1](torch.ones(1, 2)).sum() + model[2](torch.ones(1, 2, dtype=torch.float64)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for layer, value in zip(model, (float(hvd.size()), 1.0, 1.0), strict=True):
            assert bool((layer.weight.grad == value).all()), layer.weight.grad
        scaler.step(optimizer)
        scaler.update()


def check_missing_passes_are_refused() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return
    for unscales in (True, False):
        model = mlp()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(_loss(model, 0, hvd.rank(), 0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.raises(ValueError, match=r"fewer backward passes than backward_passes_per_step=2"):
            scaler.step(optimizer)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_BUCKET_BYTES": "1024", "SPARKVOD_FIRST_BUCKET_BYTES": "64"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_grad_scaler(check: str, size: int) -> None:
    SUITE.verify(check, size)
