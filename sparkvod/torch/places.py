"""Where a gradient lies in its bucket. Whether a tensor lies there is decided by memory, never by the object.

``module.half()``, ``module.share_memory()`` and ``parameter.grad.data = ...`` give a tensor object other memory, and
``parameter.grad`` is the same object as before.
"""

from __future__ import annotations

import torch

from sparkvod.core.reducer import Bucket, Slot
from sparkvod.torch import adapter


class Place:
    """The memory of one parameter's gradient.

    Args:
        parameter: the parameter.
        name: its name.
        bucket: the bucket.
        slot: where in it.
        cast: whether gradients are meant to travel in another dtype than their own.
    """

    def __init__(self, parameter: torch.nn.Parameter, name: str, bucket: Bucket, slot: Slot, cast: bool) -> None:
        self._parameter, self._name, self._slot, self._cast = parameter, name, slot, cast
        self._memory, self._dtype = bucket.memory, adapter.dtype_of(bucket.plan.dtype)
        self._begin = bucket.memory.address
        self._end = self._begin + bucket.plan.count * bucket.itemsize
        self._address = self._begin + slot.offset * bucket.itemsize if slot.count else 0
        self._planned = parameter.dtype
        self._view = self._make()

    def _make(self) -> torch.Tensor:
        parameter = self._parameter
        if parameter.numel() != self._slot.count:
            raise ValueError(
                f"parameter {self._name!r} has the shape {list(parameter.shape)} and had {self._slot.count} elements "
                "when its optimizer was distributed: make a new optimizer over the changed model and distribute it"
            )
        self._shape, self._stride = parameter.shape, parameter.stride()
        if self._slot.count == 0:
            made = torch.empty(self._shape, dtype=self._dtype)
        else:
            # The parameter's own memory order, so that the optimizer's fused loops find equal strides.
            stride = self._stride if _fills_its_memory(parameter) else None
            made = adapter.over(self._memory, self._dtype, self._slot.offset, self._shape, stride)
        self._layout = made.stride()
        return made

    @property
    def fits(self) -> bool:
        """Whether the parameter still has the dtype that the bucket was planned for."""
        return self._parameter.dtype is self._planned

    @property
    def is_direct(self) -> bool:
        """Whether the parameter's gradient can lie here."""
        return self._parameter.dtype is self._dtype and self._parameter.is_cpu

    def tensor(self) -> torch.Tensor:
        """Returns the tensor over this memory, laid out as the parameter is now.

        It is the same object as long as that still has this memory.

        Raises:
            ValueError: the parameter was converted to a dtype whose gradients cannot travel here without loss, or has
                another number of elements.
        """
        parameter = self._parameter
        if parameter.dtype is not self._planned and not self._cast:
            refuse_wider(parameter, self._name, self._planned, self._dtype)
        if parameter.shape != self._shape or parameter.stride() != self._stride or not self._is_here(self._view):
            self._view = self._make()
        return self._view

    def _is_here(self, view: torch.Tensor) -> bool:
        return (
            view.data_ptr() == self._address
            and view.dtype is self._dtype
            and view.shape == self._shape
            and view.stride() == self._layout
        )

    def load(self, gradient: torch.Tensor) -> None:
        """Copies a gradient here, unless it lies here already.

        Raises:
            ValueError: it has another shape than the parameter.
        """
        view = self.tensor()
        if gradient is view:
            return
        if gradient.shape != view.shape:
            raise ValueError(
                f"the gradient of {self._name!r} has the shape {list(gradient.shape)}, the parameter "
                f"{list(view.shape)}: assign a gradient of the parameter's shape"
            )
        if gradient.is_cpu and self._begin <= gradient.data_ptr() < self._end:
            if self._is_here(gradient):
                return
            gradient = gradient.clone()  # the same memory in another order
        view.copy_(gradient)


def refuse_wider(parameter: torch.Tensor, name: str, planned: torch.dtype, wire: torch.dtype) -> None:
    """Refuses a parameter that was converted, after the ranks agreed, to what ``wire`` cannot hold.

    Raises:
        ValueError: it was.
    """
    if torch.promote_types(parameter.dtype, wire) is not wire:
        raise ValueError(
            f"parameter {name!r} is {parameter.dtype} and was {planned} when the ranks agreed on what to exchange: "
            "convert the model before the first step, or distribute a new optimizer over the converted model"
        )


def _fills_its_memory(parameter: torch.Tensor) -> bool:
    # True when the strides are a permutation of contiguous ones: no element is skipped or shared.
    expected = 1
    for stride, length in sorted(
        (stride, length) for stride, length in zip(parameter.stride(), parameter.shape, strict=True) if length > 1
    ):
        if stride != expected:
            return False
        expected *= length
    return True
