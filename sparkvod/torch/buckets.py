"""Buckets over an optimizer's parameters: how they are planned, and what the ranks must have in common of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparkvod import config
from sparkvod.core.agreement import Description
from sparkvod.core.reducer import BucketPlan, Gradient, plan_buckets
from sparkvod.torch.gradients import named

_KNOBS = ("bucket_bytes", "first_bucket_bytes")


def plan(
    parameters: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    code_of: Callable[[torch.nn.Parameter, str], int],
    groups: Sequence[Sequence[int]] | None,
    first: int,
) -> list[BucketPlan]:
    """Returns the buckets of parameters' gradients.

    Args:
        parameters: the parameters.
        names: their names.
        code_of: returns, for a parameter and its name, the code of the dtype of its bucket.
        groups: indices of parameters that share a bucket, None to fill buckets by size.
        first: the number of the optimizer's parameters before these.

    Raises:
        ValueError: a parameter has no floating-point elements.
    """
    gradients = []
    for name, parameter in zip(names, parameters, strict=True):
        if not parameter.dtype.is_floating_point:
            raise ValueError(
                f"parameter {name!r} of {parameter.dtype} was found, a real floating-point one was expected; "
                "keep it out of the optimizer that is distributed"
            )
        gradients.append(Gradient(name, parameter.numel(), code_of(parameter, name)))
    prefix = f".from{first}" if first else ""
    return plan_buckets(gradients, prefix=prefix, groups=groups, **{knob: config.get(knob) for knob in _KNOBS})


def description(
    parameters: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    options: tuple[tuple[str, str], ...],
    plans: Sequence[BucketPlan],
) -> Description:
    """Returns what the ranks must have in common: parameters, options and the buckets that were planned."""
    return Description(
        parameters=named(parameters, names),
        options=options,
        buckets=tuple(tuple(slot.index for slot in each.slots) for each in plans),
        knobs=tuple((config.KNOBS[knob].variable, str(config.get(knob))) for knob in _KNOBS),
    )
