"""What can be said of model, optimizer and schedule before there are data: each check raises, or returns nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sparkvod.errors import NotInitializedError
from sparkvod.torch import dense

_SHOWN = 3


def check_model(model: nn.Module) -> None:
    """Checks that a model can be trained.

    Raises:
        ValueError: it has parameters without shapes, none that is trained, hooks that cannot be kept,
            gradients that are sparse, or tensors that cannot be broadcast.
    """
    lazy = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if is_lazy(value)]
    if lazy:
        raise ValueError(
            f"a model with parameters that have no shape yet was found ({_some(lazy)}), one whose parameters are all "
            "there was expected; call it once, such as model(torch.zeros(2, features)), and make the optimizer after "
            "that, or use layers that are told their sizes (Linear for LazyLinear)"
        )
    names = [name for name, _ in model.named_parameters()]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        found = f"{len(names)} parameters, all of them with requires_grad=False," if names else "no parameters"
        raise ValueError(
            f"a model with {found} was found, one with something to train was expected; call requires_grad_(True) on "
            "the layers that are to be trained"
        )
    hooked = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(
            f"the model has post-accumulate-grad hooks on parameters ({_some(hooked)}), which would see the gradients "
            "of one rank before the ranks sum them: register a step pre-hook on the optimizer instead, which runs on "
            "all ranks after that"
        )
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks]
    if hooked and isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"the TorchScript model has hooks on parameters ({_some(hooked)}), which are not saved with it: remove "
            "them, or pass the module that was compiled"
        )
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            list(dense.parts(name, value))
    sparse = [name or type(module).__name__ for name, module in model.named_modules() if _is_sparse(module)]
    if sparse:
        raise ValueError(
            f"layers with sparse=True were found ({_some(sparse)}), dense gradients were expected, which the ranks "
            "sum; make them with sparse=False"
        )


def check_optimizer(optimizer: Any) -> None:
    """Checks that an optimizer trains something, by the gradients of one backward pass.

    Raises:
        ValueError: it is none, all its parameters are frozen, or its step needs a closure.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"an optimizer function that returned {optimizer!r} was found, one that returns a torch.optim.Optimizer "
            "was expected; return the optimizer"
        )
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"the optimizer {name} was found, whose step() needs a closure that computes the loss again, one that "
            "takes the gradients of one backward pass was expected; use SGD, Adam or the like"
        )
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise ValueError(
            f"step() of this {name} was replaced in the instance, which the ranks cannot keep: define step() in a "
            "subclass, or use register_step_pre_hook() and register_step_post_hook()"
        )
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"an optimizer ({name}) over parameters that all have requires_grad=False was found, one over something "
            "to train was expected; give it the layers that are to be trained"
        )


def make_optimizer(function: Callable[..., Any], model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that a user's function makes of a model's parameters.

    Raises:
        ValueError: it raised, or what it returned cannot train.
    """
    try:
        optimizer = function(model.parameters())
    except Exception as error:
        raise ValueError(
            f"the optimizer function failed on the driver ({type(error).__name__}: {error}), one that makes an "
            "optimizer of the model's parameters there as well as on the ranks was expected; for a learning rate "
            "times the number of ranks, pass scale_lr=True"
        ) from error
    check_optimizer(optimizer)
    return optimizer


def check_scheduler(scheduler: Any) -> None:
    """Checks what an ``lr_scheduler`` function returned.

    Raises:
        ValueError: it has no ``step`` and ``state_dict``.
    """
    if not (callable(getattr(scheduler, "step", None)) and callable(getattr(scheduler, "state_dict", None))):
        raise ValueError(
            f"an lr_scheduler function that returned {scheduler!r} was found, one that returns a scheduler was "
            "expected; return it, as in lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)"
        )


def try_scheduler(function: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
    """Makes a schedule of an optimizer that may be used up.

    Raises:
        ValueError: the function raised, other than because it asks for ranks that the driver does not have, or what
            it returned is no scheduler.
    """
    try:
        scheduler = function(optimizer)
    except NotInitializedError:
        return
    except Exception as error:
        raise ValueError(
            f"the lr_scheduler function failed ({type(error).__name__}: {error}), one that makes a scheduler of the "
            "optimizer was expected; it is called with the optimizer alone"
        ) from error
    check_scheduler(scheduler)


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
