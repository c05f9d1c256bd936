"""Gradients on their way: kept out of everybody's hands from the end of backward until they are reduced.

The engine reads and writes a gradient's memory while it is reduced. What a program wrote into it meanwhile would reach
some ranks and not others, and a write through ``.data`` leaves no trace that could be found afterwards. So
``parameter.grad`` is a stand-in without memory during that time, and any use of it is an error where it is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

_UNSCALE: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_ACCUMULATE: Any = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
# What may be asked of a stand-in: what does not need the elements.
_METADATA = {"dtype", "device", "grad_fn", "is_cpu", "is_cuda", "is_sparse", "layout", "requires_grad", "shape"}


class Owner(Protocol):
    """Who reduces the gradients."""

    def complete(self) -> list[torch.Tensor]:
        """Reduce all gradients for a GradScaler that has begun to look at this rank's.

        Returns:
            Gradients that it will not find by itself: of dtypes and devices that this rank had none of.
        """

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the parameters have now."""

    def computed_again(self, name: str) -> AssertionError:
        """Return what to raise where a parameter gets a second gradient while the first is on its way."""


class InFlight(torch.Tensor):
    """Stands for a gradient that is being reduced; has its shape and dtype, and no elements.

    ``torch.amp.GradScaler`` is the exception: where it unscales, the gradients are reduced first, and what it finds to
    be not finite is so on all ranks.
    """

    taken: weakref.ref[Taken]
    place: int

    @staticmethod
    def __new__(cls, taken: Taken, place: int) -> InFlight:
        """Return a stand-in for the gradient of a parameter, by its place in ``taken``."""
        like = taken.parameters[place]
        made: InFlight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.taken, made.place = weakref.ref(taken), place
        return made

    def __init__(self, taken: Taken, place: int) -> None:
        """Has nothing left to do."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what it stands for."""
        return f"<the gradient of {self._name()!r}, which is being reduced>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what needs no elements; refuse all else, before it looks for memory that is not there."""
        asks = getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") in _METADATA
        if not asks and func is not torch._amp_foreach_non_finite_check_and_unscale_:
            raise _first(cls, args, kwargs)._refused()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reduce what a GradScaler unscales; refuse all else."""
        mine = _first(cls, args, kwargs)
        taken = mine.taken()
        owner = taken.owner() if taken is not None else None
        in_backward = torch._C._current_graph_task_id() != -1
        if owner is None or taken is None:
            raise mine._refused()
        if func is _UNSCALE and not in_backward:
            _, found, inverse = args
            others = owner.complete() if taken.begun else []
            alike = [g for g in owner.gradients() if g.device == mine.device and g.dtype is mine.dtype]
            func(alike, found, inverse)
            for other in others:
                func([other], found, inverse)
            return None
        raise owner.computed_again(mine._name()) if in_backward and func in _ACCUMULATE else mine._refused()

    def _name(self) -> str:
        taken = self.taken()
        return "a parameter" if taken is None else taken.names[self.place]

    def _refused(self) -> ValueError:
        return ValueError(
            f"the gradient of {self._name()!r} is being reduced, from backward() to step() or synchronize(): to read "
            "or change gradients (clip, log), call synchronize() of the DistributedOptimizer after backward(), and "
            "step() within 'with optimizer.skip_synchronize():'. For gradients of gradients use "
            "torch.autograd.grad(..., create_graph=True)"
        )


def _first(cls: type[InFlight], args: Any, kwargs: Any) -> InFlight:
    found: InFlight = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
    return found


class Taken:
    """Gradients that are on their way, as they were when they were taken.

    Args:
        parameters: the parameters.
        names: their names.
        owner: who reduces them.

    Attributes:
        parameters: the parameters.
        names: their names.
        owner: who reduces them, as long as it lives.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], owner: Owner) -> None:
        self.parameters, self.names, self.owner = list(parameters), list(names), weakref.ref(owner)
        self._gradients: dict[int, tuple[torch.nn.Parameter, torch.Tensor, int]] = {}
        self._stand_ins: dict[int, InFlight] = {}
        # An optimizer that is dropped meanwhile leaves its parameters as they were.
        weakref.finalize(self, _put_back, self._gradients).atexit = False

    @property
    def begun(self) -> bool:
        """Whether a gradient is on its way."""
        return bool(self._gradients)

    def take(self, index: int) -> None:
        """Takes the gradient of a parameter, and leaves a stand-in."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        self._gradients[index] = parameter, gradient, gradient._version
        parameter.grad = self._stand_in(index, parameter)

    def _stand_in(self, index: int, parameter: torch.nn.Parameter) -> InFlight:
        found = self._stand_ins.get(index)
        if found is None or not _alike(found, parameter):
            found = self._stand_ins[index] = InFlight(self, index)
        return found

    def gradient(self, index: int) -> torch.Tensor:
        """Returns a gradient that was taken."""
        return self._gradients[index][1]

    def restore(self) -> list[int]:
        """Puts the gradients back, to take the results, and returns those that were replaced or changed meanwhile.

        A change is one through a tensor that was the parameter's gradient before.
        """
        changed = [
            index
            for index, (parameter, gradient, version) in self._gradients.items()
            if parameter.grad is not self._stand_ins[index]
            or gradient._version != version
            or not _alike(gradient, parameter)
        ]
        _put_back(self._gradients)
        return changed


def _alike(gradient: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    return (
        gradient.dtype is parameter.dtype and gradient.device == parameter.device and gradient.shape == parameter.shape
    )


def _put_back(gradients: dict[int, tuple[torch.nn.Parameter, torch.Tensor, int]]) -> None:
    while gradients:
        _, (parameter, gradient, _) = gradients.popitem()
        # A conversion that was refused half-way has left a parameter that can hold no such gradient.
        parameter.grad = gradient if _alike(gradient, parameter) else None
