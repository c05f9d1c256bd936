"""The allreduce of sparse tensors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch

from sparkvod.core import handles
from sparkvod.errors import HorovodInternalError, MismatchError
from tests.contracts.worlds import Suite


def join() -> None:
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def check_sparse() -> None:
    import sparkvod.torch as hvd

    rank, n = hvd.rank(), hvd.size()

    def of(rank: int, dtype: torch.dtype) -> torch.Tensor:
        # Of rank 0 nothing; of the others so many elements, of which one is there twice.
        rows = torch.arange(rank) % 3
        indices = torch.stack([rows, (rows + rank) % 5])
        return torch.sparse_coo_tensor(indices, torch.ones(rank, 2, dtype=dtype) * rank, (4, 5, 2))

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        total = sum(of(r, dtype).to_dense() for r in range(n))
        for _ in range(2):
            summed = hvd.sparse_allreduce_async(of(rank, dtype), name=f"sum.{dtype}", op=hvd.Sum)
            averaged = hvd.sparse_allreduce_async(of(rank, dtype), f"mean.{dtype}", hvd.Average)
            result = summed()
            assert result.is_sparse
            assert result.dtype == dtype
            assert result is summed()
            torch.testing.assert_close(result.to_dense(), total)
            if dtype.is_floating_point:
                torch.testing.assert_close(averaged().to_dense(), total / n)
            else:
                averaged()
    assert hvd.sparse_allreduce_async(torch.zeros(3, 2).to_sparse(), name="empty", op=hvd.Sum)()._nnz() == 0


def check_bad_sparse() -> None:
    import sparkvod.torch as hvd

    sparse = torch.eye(3).to_sparse()
    for wrong, op, words in (
        (torch.eye(3), hvd.Sum, "layout torch.strided"),
        (torch.eye(3).to_sparse_csr(), hvd.Sum, "layout torch.sparse_csr"),
        (sparse, hvd.Max, "op=4 was found for a sparse tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.sparse_allreduce_async(wrong, "x", op)
    not_a_tensor: Any = [1.0]
    with pytest.raises(TypeError, match="a list was found"):
        hvd.sparse_allreduce_async(not_a_tensor, "x", hvd.Sum)
    if hvd.size() == 1:
        return
    for odd in (torch.zeros(4, 3).to_sparse(), torch.eye(3).to_sparse(1), torch.eye(3).double().to_sparse()):
        wait = hvd.sparse_allreduce_async(odd if hvd.rank() == 1 else sparse, "odd", hvd.Sum)
        with pytest.raises(MismatchError, match="rank 1 sent"):
            wait()
        with pytest.raises(HorovodInternalError, match="'odd' has failed"):
            wait()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_one_that_nobody_waits_for() -> None:
    """The engine may still read its tensors, so they stay until it has ended."""
    import sparkvod.torch as hvd

    sparse = torch.eye(3).to_sparse()
    if hvd.size() == 1:  # it may have ended before anybody looks
        return
    if hvd.rank() == 0:
        hvd.sparse_allreduce_async(sparse, "left", hvd.Sum)
        assert len(handles._abandoned) == 1
        hvd.barrier()
    else:
        hvd.barrier()
        wait = hvd.sparse_allreduce_async(sparse, "left", hvd.Sum)
        torch.testing.assert_close(wait().to_dense(), torch.eye(3) * hvd.size())


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_COLLECTIVE_TIMEOUT": "20"})


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_sparse(check: str, size: int) -> None:
    SUITE.verify(check, size)
