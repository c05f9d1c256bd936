"""PyTorch's collectives, for whatever ``torch.as_tensor`` takes, and variables of Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sparkvod.torch import ops, scatter


def tensor_of(value: Any) -> Any:
    """Returns the tensor itself, or one made of the value."""
    value = getattr(value, "value", value)
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _one(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(value: Any, *args: Any, **arguments: Any) -> Any:
        return collective(tensor_of(value), *args, **arguments)

    return call


def _group(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(values: Any, *args: Any, **arguments: Any) -> Any:
        return collective([tensor_of(value) for value in values], *args, **arguments)

    return call


allreduce = _one(ops.allreduce)
allgather = _one(ops.allgather)
broadcast = _one(ops.broadcast)
reducescatter = _one(scatter.reducescatter)
alltoall = _one(scatter.alltoall)
grouped_allreduce = _group(ops.grouped_allreduce)
grouped_allgather = _group(scatter.grouped_allgather)
grouped_reducescatter = _group(scatter.grouped_reducescatter)
barrier = ops.barrier
