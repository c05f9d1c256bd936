"""Pickling what PyTorch does not, or only in part: parametrized modules, optimizers with all that they hold, hooks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class ModelPickler(cloudpickle.Pickler):
    """Pickles modules and optimizers whole.

    PyTorch refuses to pickle modules with parametrizations, whose class it made for that one instance, and leaves the
    hooks and the own attributes of an optimizer out.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Returns how modules and optimizers are pickled, and what cloudpickle does with all others."""
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            cls = parametrize.type_before_parametrizations(obj)
            return _bare, (cls,), vars(obj), None, None, _set_parametrized
        if isinstance(obj, Optimizer) and type(obj).__getstate__ is Optimizer.__getstate__:
            # A learning-rate scheduler may have put its wrapper of the old step in the instance.
            state = {name: value for name, value in vars(obj).items() if name != "step"}
            return _bare, (type(obj),), state, None, None, _set_optimizer
        return super().reducer_override(obj)


#: For ``torch.save``, which wants a module.
MODULE: Any = SimpleNamespace(__name__="cloudpickle", Pickler=ModelPickler, dumps=cloudpickle.dumps)


def _bare(cls: type) -> Any:
    return object.__new__(cls)


def _set_parametrized(module: nn.Module, state: dict[str, Any]) -> None:
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


def _set_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    optimizer.__dict__.update(state)
    optimizer._patch_step_function()  # the class's, so that it calls hooks
    _reserve(optimizer)


def _reserve(owner: nn.Module | Optimizer) -> None:
    """Keeps the numbers of hooks that came in a pickle from new hooks, which would replace them."""
    for name, hooks in vars(owner).items():
        if name.endswith("_hooks") and hooks:
            RemovableHandle.next_id = max(RemovableHandle.next_id, *(number + 1 for number in hooks))


@dataclass(frozen=True)
class Hooked:
    """A module with its parameters' hooks, which do not travel with tensors; pickled together, they share objects."""

    model: nn.Module
    hooks: dict[str, list[Any]]

    def attach(self) -> nn.Module:
        """Returns the module, its hooks registered anew."""
        parameters = dict(self.model.named_parameters())
        for name, functions in self.hooks.items():
            parameter = parameters[name]
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # hooks are refused without; it may be trained later
            for function in functions:
                parameter.register_hook(function)
            parameter.requires_grad_(trained)
        return self.model


def made(found: nn.Module | Hooked) -> nn.Module:
    """Returns the module that :func:`with_hooks` gave to the pickle, with all its hooks."""
    model = found.attach() if isinstance(found, Hooked) else found
    for module in model.modules():
        _reserve(module)
    return model


def with_hooks(model: nn.Module) -> nn.Module | Hooked:
    """Returns the module, together with the hooks of its parameters if there are any."""
    hooks = {name: list(p._backward_hooks.values()) for name, p in model.named_parameters() if p._backward_hooks}
    return Hooked(model, hooks) if hooks else model


def dump_apart(value: Any, known: Mapping[int, Any]) -> bytes:
    """Returns ``value`` pickled, but for the objects whose ids are ``known``: of these only what stands there."""
    buffer = io.BytesIO()
    pickler = ModelPickler(buffer)
    pickler.persistent_id = lambda obj: known.get(id(obj))
    pickler.dump(value)
    return buffer.getvalue()


def load_apart(content: bytes, known: Mapping[Any, Any]) -> Any:
    """Returns what :func:`dump_apart` wrote, with what is ``known`` now in the places of what was then."""
    unpickler = pickle.Unpickler(io.BytesIO(content))
    unpickler.persistent_load = known.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


def places(model: nn.Module) -> dict[Any, Any]:
    """Returns a model's parameters (by number), modules and buffers (by name), by kind and place."""
    return {
        **{("module", name): module for name, module in model.named_modules()},
        **{("buffer", name): buffer for name, buffer in model.named_buffers()},
        **{("parameter", number): parameter for number, parameter in enumerate(model.parameters())},
    }


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what an optimizer holds besides what PyTorch gives all of them: what its class, or a user, added."""
    common = {*vars(Optimizer([torch.zeros(1)], {})), "step", "_exchange", "_synchronized", "_synchronizes"}
    return {name: value for name, value in vars(optimizer).items() if name not in common}
