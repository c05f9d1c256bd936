"""The allreduce of sparse tensors: what each rank has is gathered, and summed where it is used."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparkvod.core import basics, collectives
from sparkvod.core.handles import abandon_all
from sparkvod.core.ops import Average, Sum, allreduce_op, set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.errors import HorovodInternalError
from sparkvod.torch import adapter


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of sparse tensors, of which each rank has its own elements.

    Args:
        tensor: a COO tensor of the same shape, dtype and number of sparse dimensions on all ranks.
        name: name of the operation, the same on all ranks.
        op: ``Average``, which is the default, or ``Sum``.
        process_set: among which ranks; by default among all.

    Returns:
        What waits, when it is called, and returns the result: a COO tensor with the elements of all ranks in the order
        of the ranks. Indices that several ranks have are there several times; ``coalesce()`` sums them. An average of
        integers is rounded towards zero, element by element.

    Raises:
        TypeError: ``tensor`` is no tensor.
        ValueError: it is not sparse, or ``op`` is neither.
    """
    op = allreduce_op(op, None)
    if op not in (Average, Sum):
        raise ValueError(
            f"op={op} was found for a sparse tensor, Average or Sum was expected; make it dense for others"
        )
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} was found, a sparse torch.Tensor was expected")
    if tensor.is_nested:
        adapter.host(tensor)  # says what to send instead
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"a tensor of layout {tensor.layout} was found, one of torch.sparse_coo was expected; call to_sparse(), "
            "or allreduce() for a dense one"
        )
    members = set_id(process_set)
    ranks = len(basics.world().ranks_of(members))
    source = tensor.detach()
    # Uncoalesced tensors are taken as they are: their elements add up in the end like those of other ranks.
    indices, values = source._indices().t().contiguous(), source._values()
    # Rows without elements, whose other dimensions must be the same on all ranks: the shape.
    shape = torch.empty((0, source.sparse_dim(), *source.shape), dtype=torch.bool)
    pending = collectives.grouped_allgather(adapter, [indices, values, shape], name, process_set=members)
    left, result = [pending], list[torch.Tensor]()

    def finish() -> torch.Tensor:
        if left:
            (all_indices, _), (all_values, _), _ = left.pop().wait()
            if op == Average:
                exact = all_values.is_floating_point() or all_values.is_complex()
                all_values = all_values / ranks if exact else all_values.div(ranks, rounding_mode="trunc")
            result.append(torch.sparse_coo_tensor(all_indices.t(), all_values, source.shape, device=tensor.device))
        if not result:
            raise HorovodInternalError(f"the allreduce of {name!r} has failed, as an earlier call said; start it anew")
        return result[0]

    # Who drops it unasked leaves tensors that the engine still reads.
    abandon_all(finish, lambda: left)
    return finish
