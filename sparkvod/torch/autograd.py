"""Derivatives of the collectives that return new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from sparkvod.core import basics, collectives, ops
from sparkvod.torch import adapter


def _check_differentiable(op: int) -> None:
    ops.check_differentiable(op, "detach the tensor")


def _place(members: int) -> int:
    # This rank's place among the ranks of a process set.
    return basics.world().ranks_of(members).index(basics.rank())


class Allreduce(Function):
    """The gradient of a sum or average is that of the gradients, by the same operation and factors."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str, op: int, prescale: float, postscale: float, members: int
    ) -> torch.Tensor:
        """Reduces into a new tensor."""
        ctx.arguments = (name, op, prescale, postscale, members)
        return collectives.allreduce(
            adapter, tensor, name, op, prescale, postscale, in_place=False, wake=False, process_set=members
        ).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Reduces the gradient."""
        name, op, prescale, postscale, members = ctx.arguments
        _check_differentiable(op)
        return Allreduce.apply(grads[0], f"{name}.grad", op, prescale, postscale, members), None, None, None, None, None


class GroupedAllreduce(Function):
    """As ``Allreduce``, for a list of tensors."""

    @staticmethod
    def forward(
        ctx: Any, name: str, op: int, prescale: float, postscale: float, members: int, *tensors: torch.Tensor
    ) -> Any:
        """Reduces into new tensors."""
        ctx.arguments = (name, op, prescale, postscale, members)
        return tuple(
            collectives.grouped_allreduce(
                adapter, tensors, name, op, prescale, postscale, in_place=False, wake=False, process_set=members
            ).wait()
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Reduces the gradients."""
        name, op, prescale, postscale, members = ctx.arguments
        _check_differentiable(op)
        return (
            None,
            None,
            None,
            None,
            None,
            *GroupedAllreduce.apply(f"{name}.grad", op, prescale, postscale, members, *grads),
        )


class Allgather(Function):
    """The gradient of an allgather is the average of the gradients over the ranks, of which each keeps its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, members: int) -> torch.Tensor:
        """Gathers into a new tensor."""
        gathered, rows = collectives.allgather(adapter, tensor, name, wake=False, process_set=members).wait()
        place = _place(members)
        ctx.name, ctx.shape, ctx.members = name, tensor.shape, members
        ctx.first = sum(rows[:place])
        ctx.rows = rows[place]
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Averages the gradient and cuts out this rank's rows."""
        averaged = Allreduce.apply(grads[0], f"{ctx.name}.grad", ops.Average, 1.0, 1.0, ctx.members)
        return averaged.narrow(0, ctx.first, ctx.rows).reshape(ctx.shape), None, None


class GroupedAllgather(Function):
    """As ``Allgather``, for a list of tensors."""

    @staticmethod
    def forward(ctx: Any, name: str, members: int, *tensors: torch.Tensor) -> Any:
        """Gathers into new tensors."""
        place = _place(members)
        gathered = collectives.grouped_allgather(adapter, tensors, name, wake=False, process_set=members).wait()
        ctx.name, ctx.members = name, members
        ctx.places = [
            (sum(rows[:place]), rows[place], tensor.shape) for (_, rows), tensor in zip(gathered, tensors, strict=True)
        ]
        return tuple(result for result, _ in gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Averages the gradients and cuts out this rank's rows."""
        averaged = GroupedAllreduce.apply(f"{ctx.name}.grad", ops.Average, 1.0, 1.0, ctx.members, *grads)
        return (
            None,
            None,
            *(
                grad.narrow(0, first, rows).reshape(shape)
                for grad, (first, rows, shape) in zip(averaged, ctx.places, strict=True)
            ),
        )


class Reducescatter(Function):
    """The gradient of a reducescatter is the allgather of the gradients; of a sum times the size, as in the peer."""

    @staticmethod
    def forward(
        ctx: Any, name: str, op: int, prescale: float, postscale: float, members: int, *tensors: torch.Tensor
    ) -> Any:
        """Reduces into new tensors."""
        ctx.arguments = (name, op, prescale * postscale, members)
        return tuple(
            collectives.reducescatter(
                adapter, tensors, name, op, prescale, postscale, wake=False, process_set=members
            ).wait()
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gathers the gradients."""
        name, op, scale, members = ctx.arguments
        _check_differentiable(op)
        scale *= len(basics.world().ranks_of(members)) if op == ops.Sum else 1
        gathered = GroupedAllgather.apply(f"{name}.grad", members, *grads)
        return None, None, None, None, None, *(grad * scale if scale != 1 else grad for grad in gathered)


class Alltoall(Function):
    """The gradient of an alltoall goes back to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, splits: Sequence[int] | None, members: int) -> Any:
        """Exchanges into a new tensor; returns it and the numbers of rows that came from each rank."""
        received, rows = collectives.alltoall(adapter, tensor, name, splits, wake=False, process_set=members).wait()
        ctx.name, ctx.rows, ctx.sent, ctx.members = name, rows, tensor.shape[0], members
        counts = torch.tensor(rows, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sends the gradients back; rows that were not sent have none."""
        back, _ = Alltoall.apply(grads[0].contiguous(), f"{ctx.name}.grad", ctx.rows, ctx.members)
        missing = ctx.sent - back.shape[0]
        if missing:
            back = torch.cat([back, back.new_zeros((missing, *back.shape[1:]))])
        return back, None, None, None


class Broadcast(Function):
    """The gradient of a broadcast is, on the root, the average of the gradients over the ranks; elsewhere zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str, members: int) -> torch.Tensor:
        """Broadcasts into a new tensor."""
        ctx.root_rank, ctx.name, ctx.members = root_rank, name, members
        return collectives.broadcast(
            adapter, tensor, name, root_rank, in_place=False, wake=False, process_set=members
        ).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Averages the gradient."""
        averaged = Allreduce.apply(grads[0], f"{ctx.name}.grad", ops.Average, 1.0, 1.0, ctx.members)
        return averaged if basics.rank() == ctx.root_rank else averaged * 0, None, None, None


def wanted(tensor: torch.Tensor) -> bool:
    """Returns whether autograd records operations on the tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()
