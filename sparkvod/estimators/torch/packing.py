"""Models and optimizers as bytes: for the workers, for saving, for predicting."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

_SCRIPT, _MODULE = b"script:", b"module:"


def dump_model(model: nn.Module) -> bytes:
    """Returns a module, or a TorchScript module, as bytes; classes of ``__main__`` and notebooks go along.

    Raises:
        TypeError: the model cannot be pickled.
    """
    buffer = io.BytesIO()
    if isinstance(model, torch.jit.ScriptModule):
        torch.jit.save(model, buffer)
        return _SCRIPT + buffer.getvalue()
    try:
        torch.save(model, buffer, pickle_module=cloudpickle, pickle_protocol=4)
    except Exception as error:
        raise TypeError(
            f"model of class {type(model).__name__} cannot be pickled ({type(error).__name__}: {error}), a "
            "model that can "
            "be sent to the workers was expected; make what cannot be pickled (locks, files, connections) in forward()"
        ) from error
    return _MODULE + buffer.getvalue()


def load_model(content: bytes) -> nn.Module:
    """Returns the model that :func:`dump_model` wrote, on the CPU."""
    kind, body = content[:7], io.BytesIO(memoryview(content)[7:])
    if kind == _SCRIPT:
        return torch.jit.load(body, map_location="cpu")
    return torch.load(body, map_location="cpu", weights_only=False)


def dump_state(state: Any) -> bytes:
    """Returns a state dict as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_state(content: bytes) -> Any:
    """Returns what :func:`dump_state` wrote, on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


@dataclass(frozen=True)
class DetachedOptimizer:
    """An optimizer whose parameters are numbers: places in the list of the model's parameters."""

    optimizer: torch.optim.Optimizer

    def attach(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer over the parameters of ``model``."""
        return _exchange(self.optimizer, list(model.parameters()).__getitem__)


def detach(optimizer: torch.optim.Optimizer, model: nn.Module) -> DetachedOptimizer:
    """Takes an optimizer apart from its model.

    Its parameters are the model's, or, when none of them is (both were copied apart from each other, as scikit-learn's
    ``clone`` does), as many and of the same shapes.

    Raises:
        ValueError: the optimizer has other parameters.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_apart = not any(id(parameter) in numbers for parameter in own)
    if is_apart and [p.shape for p in own] == [p.shape for p in model.parameters()]:
        numbers = {id(parameter): number for number, parameter in enumerate(own)}
    strangers = [tuple(parameter.shape) for parameter in own if id(parameter) not in numbers]
    if strangers:
        raise ValueError(
            f"an optimizer with parameters of shapes {strangers[:3]} that are not the model's was found, an "
            "optimizer over "
            "the model's parameters was expected; make it as torch.optim.X(model.parameters(), ...), or pass a "
            "function "
            "of the parameters"
        )
    return DetachedOptimizer(_exchange(optimizer, lambda parameter: numbers[id(parameter)]))


def _exchange(optimizer: torch.optim.Optimizer, mapped: Any) -> torch.optim.Optimizer:
    other = copy.copy(optimizer)
    other.param_groups = [
        {**group, "params": [mapped(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict, {mapped(p): copy.deepcopy(state) for p, state in optimizer.state.items()})
    return other
