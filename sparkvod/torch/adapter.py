"""PyTorch tensors as the core sees them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch

from sparkvod import log
from sparkvod._native import Exchange, Memory
from sparkvod.core import basics, ops

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in ops.CODES.items() if hasattr(torch, name)
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def exchange_by(table: Any) -> Exchange | None:
    """Returns what sees tensors through PyTorch's exchange table; None without one, or with one of another version."""
    if table is None:
        return None
    try:
        # Other subclasses may hold their elements elsewhere.
        return Exchange(table, [torch.Tensor, torch.nn.Parameter], "is_neg")
    except ValueError as e:
        log.get("torch").info("tensors are described by Python, which is slower: %s", e)
        return None


exchange = exchange_by(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


def dtype_code(dtype: torch.dtype, what: str = "the tensor") -> int:
    """Returns the engine's code of a dtype.

    Raises:
        ValueError: it has none.
    """
    code = DTYPE_CODES.get(dtype)
    if code is None:
        known = ", ".join(str(known) for known in DTYPE_CODES)
        raise ValueError(f"{what} of {dtype} was found, one of {known} was expected; cast it")
    return code


def dtype_of(code: int) -> torch.dtype:
    """Returns the dtype with this code."""
    return _DTYPES[code]


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if it lies contiguously in host memory, else a copy that does."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a {type(tensor).__name__} was found, a torch.Tensor was expected; convert it by torch.as_tensor"
        )
    if tensor.is_nested:
        raise ValueError(
            "nested tensors cannot be sent, since their rows have different shapes: send tensor.values() and the "
            "offsets of the rows, each tensor of tensor.unbind(), or torch.nested.to_padded_tensor(tensor, 0.0)"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} was found, a dense one was expected; call to_dense() first"
        )
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    if tensor.is_meta:
        raise ValueError("a tensor on the device meta was found, one with values was expected; give it memory first")
    return tensor.detach().cpu().contiguous()


def describe(tensor: torch.Tensor) -> tuple[int, int, int, Sequence[int]]:
    """Returns address, number of elements, code of the dtype and shape."""
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        code = dtype_code(tensor.dtype)
    return tensor.data_ptr(), tensor.numel(), code, tensor.shape


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape and dtype in host memory, not initialised."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def empty_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns a host tensor of ``rows`` rows of the tensor's, not initialised."""
    return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies across devices and memory layouts, outside autograd."""
    with torch.no_grad():
        target.copy_(source)


def place_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the device of ``like``."""
    return tensor if like.is_cpu else tensor.to(like.device)


def from_memory(memory: Memory, like: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns a tensor of ``rows`` rows over engine memory, which it keeps alive."""
    shape = (rows, *like.shape[1:])
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=like.dtype)
    return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(shape)).view(shape)


def empty(*shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor of zeros in engine memory: collectives on it, in place, need no copy between ranks of a host.

    Args:
        *shape: the dimensions, as integers or as one sequence.
        dtype: the default dtype when None.

    Raises:
        NotInitializedError: before ``init``.
        TypeError: a dimension is no whole number, or ``dtype`` no dtype.
        ValueError: a dimension is negative, there are too many elements, or the dtype has no code in the engine.
        HorovodInternalError: the rank's engine memory has no room for it.
    """
    dims: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if not all(isinstance(length, SupportsIndex) for length in dims):
        raise TypeError(f"a shape of {dims!r} was found, whole numbers were expected")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} was found, a dtype as torch.float32 was expected")
    dims = [operator.index(length) for length in dims]
    dtype = dtype or torch.get_default_dtype()
    nbytes = math.prod(dims) * ops.ITEMSIZES[dtype_code(dtype, "a tensor")]
    if any(length < 0 or length >= 1 << 63 for length in dims) or nbytes >= 1 << 63:
        raise ValueError(
            f"a shape of {dims} was found, dimensions from 0 and less than 2**63 bytes in all were expected"
        )
    engine = basics.engine()
    return torch.empty(dims, dtype=dtype) if nbytes == 0 else over(engine.allocate(nbytes), dtype, 0, dims)


def over(
    memory: Memory, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None
) -> torch.Tensor:
    """Returns a tensor over a part of engine memory, which it keeps alive.

    It is no view of another tensor, so that autograd and ``zero_grad`` treat it like any gradient.

    Args:
        memory: the memory.
        dtype: dtype of the elements.
        offset: first element, counted in elements from the beginning of the memory.
        shape: the dimensions, none of them 0.
        stride: strides in elements, which must cover as many elements as ``shape`` has; None for contiguous.
    """
    itemsize = ops.ITEMSIZES[DTYPE_CODES[dtype]]
    count = math.prod(shape)
    tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset * itemsize)
    return tensor.resize_(tuple(shape)) if stride is None else tensor.as_strided_(tuple(shape), tuple(stride))


def is_floating(tensor: torch.Tensor) -> bool:
    """Returns whether the elements are real floating-point numbers."""
    return tensor.dtype.is_floating_point


def dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the tensor's dtype."""
    return tensor.dtype


def cast(tensor: torch.Tensor, dtype: torch.dtype | str) -> torch.Tensor:
    """Returns the tensor in another dtype, given as such or by its name in ``ops.DTYPES``."""
    return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
