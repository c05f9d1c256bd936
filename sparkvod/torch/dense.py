"""Tensors of any kind as plain ones that share their memory, which the engine can fill."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparkvod.torch.adapter import DTYPE_CODES, host

#: Dtypes of as many bytes that the engine knows.
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and tensors that share all of a tensor's memory, dense, without overlaps, of the engine's dtypes.

    Of a complex tensor that is a view of its real and imaginary parts, of a float8 or unsigned one its bytes, of a
    sparse one indices and values, of an expanded one what is there once. Others come back as they are.

    Raises:
        ValueError: it has no such parts; the message names it.
    """
    if tensor.layout is torch.sparse_coo:
        yield from parts(f"{name}.indices", tensor._indices())
        yield from parts(f"{name}.values", tensor._values())
    elif tensor.layout in _COMPRESSED:
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        compressed = tensor.crow_indices() if by_rows else tensor.ccol_indices()
        plain = tensor.col_indices() if by_rows else tensor.row_indices()
        yield from parts(f"{name}.compressed", compressed)
        yield from parts(f"{name}.plain", plain)
        yield from parts(f"{name}.values", tensor.values())
    else:
        yield name, _engine_dtype(name, _once(name, _strided(name, tensor.detach())))


def _strided(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        try:
            host(tensor)
        except ValueError as error:
            raise ValueError(f"{name!r} cannot be broadcast: {error}") from None
    if tensor.is_quantized or tensor.is_conj():
        cure = "dequantize()" if tensor.is_quantized else "resolve_conj()"
        kind = "quantized" if tensor.is_quantized else "a conjugate view"
        raise ValueError(f"{name!r} cannot be broadcast, because it is {kind}: call {cure}")
    return tensor


def _once(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view in which no element is there twice."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    steps = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 1
    for stride, size in steps if tensor.numel() else ():
        if stride < reach:
            raise ValueError(
                f"{name!r} is a view whose elements overlap (strides {list(tensor.stride())}), which cannot be "
                "broadcast: call contiguous()"
            )
        reach += stride * (size - 1)
    return tensor


def _engine_dtype(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype in DTYPE_CODES:
        return tensor
    as_bytes = _BYTES.get(tensor.element_size())
    if as_bytes is None:
        raise ValueError(f"{name!r} is a tensor of {tensor.dtype}, which cannot be broadcast: cast it")
    return tensor.view(as_bytes)
