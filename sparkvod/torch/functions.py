"""Spreading a model's and an optimizer's state from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparkvod.core import basics
from sparkvod.core.objects import allgather_object, broadcast_object
from sparkvod.core.ops import own_set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.torch import dense, ops

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites parameters with the root's, in place.

    Tensors may be of any dtype, also those that collectives do not take, expanded, and sparse with as many values as
    the root's.

    Args:
        params: a ``state_dict()``, or named pairs as ``named_parameters()`` gives, or tensors. What is no tensor is
            left alone.
        root_rank: whose values they are, a rank of the world.
        process_set: the ranks that take part, by default all.

    Raises:
        ValueError: ``params`` is a single tensor, or holds something that can be neither pair nor tensor, or a tensor
            that cannot be broadcast (nested, quantized, with overlapping elements), which is named; this rank or the
            root is none of the process set's.
        HorovodInternalError: the ranks' parameters differ in name, shape or dtype, or a rank was lost.
    """
    own_set_id(process_set, "broadcast_parameters")
    if isinstance(params, torch.Tensor) or not isinstance(params, (Mapping, Iterable)):
        raise ValueError(
            f"params of type {type(params).__name__} was found, a state_dict or named parameters were expected; "
            "pass model.state_dict()"
        )
    pairs = (
        sorted(params.items(), key=lambda pair: str(pair[0]))
        if isinstance(params, Mapping)
        else [_named(entry) for entry in params]
    )
    found: list[tuple[str, torch.Tensor]] = []
    for number, (name, value) in enumerate(pairs):
        if isinstance(value, torch.Tensor):
            found += dense.parts(str(name or number), value)
    started = [
        ops.broadcast_async_(part, root_rank, f"broadcast.parameter.{name}", process_set) for name, part in found
    ]
    for handle in started:
        ops.synchronize(handle)


def _named(entry: Any) -> tuple[str | None, Any]:
    if isinstance(entry, tuple) and len(entry) == 2:
        return entry[0], entry[1]
    if isinstance(entry, torch.Tensor):
        return None, entry
    raise ValueError(
        f"a {type(entry).__name__} was found among the parameters, (name, tensor) pairs were expected; "
        "pass model.state_dict() or model.named_parameters()"
    )


@dataclass(frozen=True)
class _TensorAt:
    # Stands for a tensor in a state_dict that is sent as an object.
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrites the optimizer's state and hyperparameters with the root's; types and dtypes stay as on the root.

    A root without state, because it has not made a step, gives all ranks an optimizer without state.

    Args:
        optimizer: the optimizer, over equal parameters on all ranks.
        root_rank: whose state it is, a rank of the world.
        model: for compatibility; not needed.
        process_set: the ranks that take part, by default all.

    Raises:
        ValueError: the optimizer is ``LBFGS``, whose state is a history that cannot be spread; this rank or the root
            is none of the process set's.
        HorovodInternalError: a rank was lost.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("an LBFGS optimizer was found, one whose state can be broadcast was expected; use another one")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"a {type(optimizer).__name__} was found, a torch.optim.Optimizer was expected")
    is_root = basics.rank() == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = broadcast_object(
        _without_tensors(_common(optimizer.state_dict()), tensors) if is_root else None,
        root_rank,
        "broadcast.optimizer",
        process_set,
    )
    if not is_root:
        tensors = _tensors_for(skeleton)
    started = [
        ops.broadcast_async_(tensor, root_rank, f"broadcast.optimizer.{number}", process_set)
        for number, tensor in enumerate(tensors)
    ]
    for handle in started:
        ops.synchronize(handle)
    if not is_root:
        state = _with_tensors(skeleton, tensors)
        optimizer.load_state_dict(state)
        _keep_dtypes(optimizer, state)


def _common(state: dict[str, Any]) -> dict[str, Any]:
    # What lossy compression left out of the gradients is each rank's own.
    compression = state.get("compression")
    return state if compression is None else state | {"compression": compression | {"errors": {}}}


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TensorAt(len(tensors) - 1, tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _without_tensors(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(entry, tensors) for entry in value)
    return value


def _tensors_for(skeleton: Any) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, _TensorAt):
            found[value.number] = torch.empty(value.shape, dtype=value.dtype)
        elif isinstance(value, dict):
            for entry in value.values():
                visit(entry)
        elif type(value) in (list, tuple):
            for entry in value:
                visit(entry)

    visit(skeleton)
    return [found[number] for number in range(len(found))]


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _TensorAt):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _with_tensors(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(entry, tensors) for entry in value)
    return value


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    # load_state_dict casts floating-point state to its parameter's dtype, and rebuilds what it can iterate over.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, sent in state["state"].get(number, {}).items():
            loaded = optimizer.state[parameter][key]
            if not isinstance(sent, torch.Tensor):
                optimizer.state[parameter][key] = sent
            elif loaded.dtype != sent.dtype:
                optimizer.state[parameter][key] = sent.to(loaded.device)
