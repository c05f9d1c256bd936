"""NumPy's arrays as the core's tensors, for backends whose tensors reach the engine through the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkvod._native import Exchange, Memory
from sparkvod.core import ops

exchange: Exchange | None = None


def host(tensor: np.ndarray) -> np.ndarray:
    """Returns the array itself if it is contiguous, else a copy that is."""
    return tensor if tensor.flags.c_contiguous else tensor.copy()


def describe(tensor: np.ndarray) -> tuple[int, int, int, Sequence[int]]:
    """Returns address, number of elements, code of the dtype and shape.

    Raises:
        ValueError: the dtype has no code.
    """
    code = ops.CODES.get(tensor.dtype.name)
    if code is None:
        raise ValueError(f"an array of {tensor.dtype} was found, one of {', '.join(ops.DTYPES)} was expected; cast it")
    return tensor.__array_interface__["data"][0], tensor.size, code, tensor.shape


def empty_like(tensor: np.ndarray) -> np.ndarray:
    """Returns an array of the same shape and dtype, not initialised."""
    return np.empty(tensor.shape, tensor.dtype)


def empty_rows(tensor: np.ndarray, rows: int) -> np.ndarray:
    """Returns an array of ``rows`` rows of the tensor's, not initialised."""
    return np.empty((rows, *tensor.shape[1:]), tensor.dtype)


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Copies ``source`` into ``target``."""
    target[...] = source


def place_like(tensor: np.ndarray, like: Any) -> np.ndarray:
    """Returns the array: there is only the host."""
    return tensor


def from_memory(memory: Memory, like: np.ndarray, rows: int) -> np.ndarray:
    """Returns an array over engine memory, of ``like``'s dtype and ``rows`` rows of its shape."""
    shape = (rows, *like.shape[1:])
    count = int(np.prod(shape))
    return np.frombuffer(memoryview(memory), like.dtype, count).reshape(shape) if count else np.empty(shape, like.dtype)
