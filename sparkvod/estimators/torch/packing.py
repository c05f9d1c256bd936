"""Models and optimizers as bytes: for the workers, for saving, for predicting."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkvod.estimators.torch import building, pickling

_BUILT = b"built:"


def dump_model(model: nn.Module) -> bytes:
    """Returns a module, or a TorchScript module, as bytes; classes of ``__main__`` and notebooks, and hooks, go along.

    Raises:
        TypeError: the model cannot be pickled.
    """
    buffer = io.BytesIO()
    if isinstance(model, torch.jit.ScriptModule):
        torch.jit.save(model, buffer)
        return buffer.getvalue()
    if building.is_built(model):
        return _BUILT + building.dump(model)
    try:
        torch.save(pickling.with_hooks(model), buffer, pickle_module=pickling.MODULE, pickle_protocol=4)
    except Exception as error:
        raise TypeError(
            f"model of class {type(model).__name__} cannot be pickled ({type(error).__name__}: {error}), a "
            "model that can be sent to the workers was expected; make what cannot be pickled (locks, files, "
            "connections) in forward(), or pass as model a function without arguments that builds it"
        ) from error
    return buffer.getvalue()


def load_model(content: bytes) -> nn.Module:
    """Returns the model that :func:`dump_model` wrote, on the CPU."""
    if content.startswith(_BUILT):
        return building.load(content[len(_BUILT) :])
    body = io.BytesIO(content)  # shares the memory of bytes
    if _is_script(content):
        return torch.jit.load(body, map_location="cpu")
    model = pickling.made(torch.load(body, map_location="cpu", weights_only=False))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and 0 in buffer.stride():
                module._buffers[name] = buffer.contiguous()  # nothing can be loaded into an expanded tensor
    return model


def is_model(content: bytes) -> bool:
    """Returns whether :func:`dump_model` wrote this."""
    return content.startswith((_BUILT, b"PK"))


def _is_script(content: bytes) -> bool:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Returns a module's state, apart: ``model``, its tensors, and ``model_extra``, what is none, if there is any."""
    state = model.state_dict()
    extra = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in state.items() if name not in extra}
    return {"model": tensors, **({"model_extra": extra} if extra else {})}


def load_weights(model: nn.Module, state: Mapping[str, bytes]) -> None:
    """Gives a module what :func:`weights_of` returned, dumped. The tensors are read without unpickling objects.

    Raises:
        pickle.UnpicklingError: there is something else than tensors among the weights.
    """
    tensors = torch.load(io.BytesIO(state["model"]), map_location="cpu", weights_only=True)
    extra = load_state(state["model_extra"]) if "model_extra" in state else {}
    model.load_state_dict({**tensors, **extra})


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
    """An optimizer as a whole, hooks and own attributes included, in which only places stand for the model's parts."""

    content: bytes

    def attach(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer over the parameters of ``model``."""
        made: torch.optim.Optimizer = pickling.load_apart(self.content, pickling.places(model))
        return made


def detach(optimizer: torch.optim.Optimizer, model: nn.Module) -> DetachedOptimizer:
    """Takes an optimizer apart from its model.

    Its parameters are the model's, or, when none of them is (both were copied apart from each other, as scikit-learn's
    ``clone`` does), as many and of the same shapes.

    Raises:
        TypeError: the optimizer, one of its attributes or hooks, cannot be pickled.
        ValueError: the optimizer has other parameters.
    """
    known = {id(part): place for place, part in pickling.places(model).items()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_apart = not any(id(parameter) in known for parameter in own)
    if is_apart and [p.shape for p in own] == [p.shape for p in model.parameters()]:
        known |= {id(parameter): ("parameter", number) for number, parameter in enumerate(own)}
    strangers = [tuple(parameter.shape) for parameter in own if id(parameter) not in known]
    if strangers:
        raise ValueError(
            f"an optimizer with parameters of shapes {strangers[:3]} that are not the model's was found, an "
            "optimizer over "
            "the model's parameters was expected; make it as torch.optim.X(model.parameters(), ...), or pass a "
            "function "
            "of the parameters"
        )
    return DetachedOptimizer(_dump_apart(optimizer, known))


def dump_own(optimizer: torch.optim.Optimizer, model: nn.Module) -> bytes:
    """Returns what an optimizer holds besides ``state_dict()``, such as a counter of its class's own; empty if nothing.

    Raises:
        TypeError: it cannot be pickled.
    """
    own = pickling.own_attributes(optimizer)
    known = {id(part): place for place, part in _shared_parts(optimizer, model).items()}
    return _dump_apart(own, known) if own else b""


def load_own(optimizer: torch.optim.Optimizer, model: nn.Module, content: bytes) -> None:
    """Gives an optimizer, whose ``state_dict()`` was loaded before, what :func:`dump_own` returned."""
    if content:
        vars(optimizer).update(pickling.load_apart(content, _shared_parts(optimizer, model)))


def _shared_parts(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[Any, Any]:
    # An optimizer that wraps another one shares its groups and state with it, and goes on doing so.
    groups = {("group", number): group for number, group in enumerate(optimizer.param_groups)}
    shared = {"optimizer": optimizer, "groups": optimizer.param_groups, "state": optimizer.state}
    return {**pickling.places(model), **groups, **shared}


def _dump_apart(value: Any, known: dict[int, Any]) -> bytes:
    try:
        return pickling.dump_apart(value, known)
    except Exception as error:
        raise TypeError(
            f"optimizer cannot be pickled ({type(error).__name__}: {error}): its attributes and hooks are sent to the "
            "ranks with it, and must not hold a Spark session, a lock, a file or a connection"
        ) from error
