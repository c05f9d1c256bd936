"""Hooks of parameters, called on the gradient of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GradientHooks:
    """Takes the hooks off an optimizer's parameters and calls them before each step, on the summed gradients.

    During the backward pass a hook would see this rank's share of the gradient only: one that clips would clip each
    share, and one that adds weight decay would add it once per rank. Random numbers in hooks are equal on all ranks.

    Args:
        optimizer: the optimizer, not yet distributed.
        seed: of the hooks' random numbers, equal on all ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self._seed, self._steps, self._depth = seed, 0, 0
        self._hooked: list[tuple[Any, list[Callable[..., Any]]]] = []
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter._backward_hooks:
                self._hooked.append((parameter, list(parameter._backward_hooks.values())))
                parameter._backward_hooks.clear()
        if not self._hooked:
            return
        first = optimizer.register_step_pre_hook(self._call)
        order: Any = optimizer._optimizer_step_pre_hooks
        order.move_to_end(first.id, last=False)  # before the user's, which see the gradients after this
        optimizer.register_step_post_hook(self._leave)

    def _leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1

    def _call(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:  # PyTorch calls hooks once more where a class's step() calls that of its base
            return
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._seed + self._steps)
            self._steps += 1
            for parameter, hooks in self._hooked:
                for hook in hooks if parameter.grad is not None else ():
                    changed = hook(parameter.grad)
                    if changed is not None and changed is not parameter.grad:
                        parameter.grad.copy_(changed)
