"""What the optimizer's checks train with: models, data, a compressor; and the one process they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Maker = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Halved:
    """A compressor that does more than cast."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Any:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 2


def mlp(seed: int = 0) -> nn.Sequential:
    """Returns a model of six parameters, equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))


def data(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns features [rows, 8] and targets [rows, 3], equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 3, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the mean over the rows of the squared error."""
    return ((model(x) - y) ** 2).sum(dim=1).mean()


def train_alone(make: Maker, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> nn.Sequential:
    """Returns the model that one process makes of the global batches."""
    model = mlp()
    optimizer = make(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model


def assert_equal(model: nn.Module, expected: nn.Module, atol: float = 1e-5) -> None:
    """Compares all parameters."""
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
