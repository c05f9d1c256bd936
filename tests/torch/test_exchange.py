"""Sums in place of tensors that the engine sees by DLPack's table, and of those that it does not: equal results."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from tests.contracts.worlds import Suite


class Wrapped(torch.Tensor):
    """A subclass, whose elements might lie elsewhere."""


DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def join() -> None:
    import sparkvod.torch as hvd

    hvd.init()


def _all_sums(tensor: Any, name: str) -> list[Any]:
    """Returns a copy of what each form makes of a tensor of ones, which must be the tensor itself."""
    import sparkvod.torch as hvd

    results = []
    for form, sum_ in (
        ("now", lambda: hvd.allreduce_(tensor, name=f"{name}.now", op=hvd.Sum)),
        ("async", lambda: hvd.synchronize(hvd.allreduce_async_(tensor, name=f"{name}.async", op=hvd.Sum))),
    ):
        tensor.data.fill_(1)
        assert sum_() is tensor, form
        results.append(tensor.detach().clone())
    return results


def check_dtypes_and_shapes() -> None:
    import sparkvod.torch as hvd

    for name in DTYPES:
        for shape in ((), (1,), (0,), (3, 0), (7,), (2, 3, 5)):
            for result in _all_sums(torch.zeros(shape, dtype=getattr(torch, name)), f"{name}{shape}"):
                assert torch.equal(result, torch.full(shape, hvd.size(), dtype=getattr(torch, name)))


def check_layouts() -> None:
    import sparkvod.torch as hvd

    grid = torch.zeros(4, 6)
    cases = {
        "parameter": nn.Parameter(torch.zeros(5)),
        "requires grad": torch.zeros(5, requires_grad=True),
        "strided": torch.zeros(10)[::2],
        "transposed": torch.zeros(3, 4).t(),
        "part": grid[1:3],
        "columns": grid[:, 1:3],
        "one row": grid[:1, :1],
        "subclass": torch.zeros(5).as_subclass(Wrapped),
        "imaginary parts of conjugates": torch.zeros(1, dtype=torch.complex64).conj().imag,
    }
    assert cases["imaginary parts of conjugates"].is_neg()
    for name, tensor in cases.items():
        for result in _all_sums(tensor, name):
            assert torch.equal(result, torch.full(tensor.shape, float(hvd.size()))), name
    # What lies around a part is left alone.
    assert grid[3, 3:].eq(0).all()


def check_ranks_that_see_differently_agree() -> None:
    import sparkvod.torch as hvd
    from sparkvod.torch import adapter

    seen = adapter.exchange
    if hvd.rank() == 0:
        adapter.exchange = None
    try:
        for shape in ((), (1,), (2, 3)):
            for result in _all_sums(torch.zeros(shape), f"differently{shape}"):
                assert torch.equal(result, torch.full(shape, float(hvd.size())))
    finally:
        adapter.exchange = seen


def check_what_cannot_be_sent() -> None:
    import sparkvod.torch as hvd

    for what, kind, words in (
        (3, TypeError, "a int was found, a torch.Tensor was expected"),
        (torch.ones(2).to_sparse(), ValueError, "torch.sparse_coo was found"),
        (torch.ones(2, dtype=torch.complex64), ValueError, "torch.complex64"),
    ):
        for sum_ in (hvd.allreduce_, hvd.allreduce_async_):
            with pytest.raises(kind, match=words):
                sum_(what, name="no tensor", op=hvd.Sum)
    with pytest.raises(TypeError, match="name"):
        hvd.allreduce_(torch.ones(2), name=5, op=hvd.Sum)  # type: ignore[arg-type]


def check_nested_tensors_are_refused() -> None:
    import sparkvod.torch as hvd

    rows = [torch.ones(2), torch.ones(3)]
    strided = torch.nested.nested_tensor(rows)
    for nested in (strided, torch.nested.nested_tensor(rows, layout=torch.jagged)):
        for call in (
            hvd.allreduce,
            hvd.allreduce_,
            hvd.allreduce_async_,
            hvd.allgather,
            hvd.alltoall,
            hvd.reducescatter,
            lambda tensor: hvd.broadcast(tensor, 0),
            lambda tensor: hvd.broadcast_(tensor, 0),
            lambda tensor: hvd.grouped_allreduce([tensor]),
            lambda tensor: hvd.sparse_allreduce_async(tensor, "sparse"),
            lambda tensor: hvd.allreduce(tensor, compression=hvd.Compression.fp16),
            lambda tensor: hvd.broadcast_parameters({"w": tensor}, 0),
        ):
            with pytest.raises(ValueError, match="nested tensors cannot be sent"):
                call(nested)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_memory_stays_until_the_end() -> None:
    import sparkvod.torch as hvd

    handles = [hvd.allreduce_async_(torch.full((1000,), 1.0), name=f"dropped.{i}", op=hvd.Sum) for i in range(50)]
    others = [torch.full((1000,), -1.0) for _ in range(50)]
    assert all(bool((hvd.synchronize(handle) == hvd.size()).all()) for handle in handles)
    assert all(bool((other == -1).all()) for other in others)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_exchange(check: str, size: int) -> None:
    SUITE.verify(check, size)


def test_a_table_of_another_version_is_refused_and_done_without() -> None:
    import ctypes

    from sparkvod._native import Exchange
    from sparkvod.torch import adapter

    words = (ctypes.c_uint64 * 8)()
    ctypes.cast(words, ctypes.POINTER(ctypes.c_uint32))[0] = 2
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    table = new(words, b"dlpack_exchange_api", None)
    with pytest.raises(ValueError, match="of version 2 was found, one of version 1"):
        Exchange(table, [torch.Tensor], "is_neg")
    assert adapter.exchange_by(table) is None
    assert adapter.exchange_by(None) is None
    assert (adapter.exchange is not None) == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
