"""Modules that a user's function builds, which need not be pickled: the function and the weights are."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch
from torch import nn

from sparkvod.estimators import parts

_BUILDER = "_sparkvod_builder"


def build(model: Any) -> nn.Module | None:
    """Return the module that a function builds, or None where the module itself was given.

    Raises:
        ValueError: the function raises, or returns something else.
    """
    made: nn.Module | None = parts.built(model, nn.Module, "torch.nn.Module")
    if made is not None:
        vars(made)[_BUILDER] = model
    return made


def is_built(model: nn.Module) -> bool:
    """Return whether a function has built the module."""
    return _BUILDER in vars(model)


def dump(model: nn.Module) -> bytes:
    """Return a module's function, weights and other buffers."""
    buffer = io.BytesIO()
    weights = model.state_dict()
    others = {name: value for name, value in model.named_buffers() if name not in weights}
    torch.save((weights, others), buffer)
    return cloudpickle.dumps((vars(model)[_BUILDER], model.training, buffer.getvalue()))


def load(content: bytes) -> nn.Module:
    """Return the module that :func:`dump` was given, built anew.

    Raises:
        ValueError: the function builds something else than before.
    """
    function, training, state = pickle.loads(content)
    weights, others = torch.load(io.BytesIO(state), map_location="cpu", weights_only=False)
    with torch.random.fork_rng(devices=[]):  # the weights that it draws are replaced
        model = build(function)
    assert model is not None
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise ValueError(f"model={name} must build the same module each time it is called: {error}") from error
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in others.items():
            buffers[name].copy_(value)
    return model.train(training)
