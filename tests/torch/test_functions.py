"""Spreading models, optimizer state and objects."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from tests.contracts.worlds import Suite
from tests.torch.models import assert_equal, data, loss_of, mlp


def join() -> None:
    import sparkvod.torch as hvd

    hvd.init()


def check_parameters() -> None:
    import sparkvod.torch as hvd

    root = hvd.size() - 1
    expected = mlp(seed=root)
    for give in (
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
    ):
        model = mlp(seed=hvd.rank())
        hvd.broadcast_parameters(give(model), root_rank=root)
        assert_equal(model, expected, atol=0)
    norm = nn.BatchNorm1d(3)
    norm.num_batches_tracked += hvd.rank()
    norm.running_mean += hvd.rank()
    hvd.broadcast_parameters(norm.state_dict(), root_rank=root)
    assert norm.num_batches_tracked.item() == root
    assert norm.running_mean.tolist() == [root] * 3
    for wrong in (torch.ones(3), 7, ["a", "b"]):
        with pytest.raises(ValueError, match="was found"):
            hvd.broadcast_parameters(wrong, root_rank=0)


KINDS = {
    "complex": lambda n: torch.full((2, 3), complex(n, -n), dtype=torch.complex64),
    "complex128": lambda n: torch.tensor(complex(n, 1), dtype=torch.complex128),
    "float8": lambda n: torch.full((3,), float(n)).to(torch.float8_e4m3fn),
    "uint16": lambda n: torch.tensor(40_000 + n, dtype=torch.uint16),
    "uint32": lambda n: torch.full((2, 3), 2**32 - 1 - n, dtype=torch.uint32).t(),
    "uint64": lambda n: torch.full((2,), 2**63 + n, dtype=torch.uint64),
    "expanded": lambda n: (torch.arange(4.0) + n).expand(3, 4),
    "expanded number": lambda n: torch.tensor(float(n)).expand(5),
    "coo": lambda n: torch.eye(3).roll(n, 0).mul(n + 1).to_sparse(),
    "csr": lambda n: torch.eye(3).roll(n, 0).mul(n + 1).to_sparse_csr(),
    "csc": lambda n: torch.eye(3, dtype=torch.complex64).roll(n, 0).mul(n + 1).to_sparse_csc(),
    "bsr": lambda n: torch.eye(4).mul(n + 1).to_sparse_bsr((2, 2)),
    "every other": lambda n: torch.arange(6.0)[::2] + n,
    "none": lambda n: torch.zeros(0, 3, dtype=torch.complex64),
}


def check_parameters_of_all_kinds() -> None:
    import sparkvod.torch as hvd

    root = hvd.size() - 1
    found = {name: make(hvd.rank()) for name, make in KINDS.items()}
    hvd.broadcast_parameters(found, root_rank=root)
    for name, make in KINDS.items():
        expected = make(root)
        assert (found[name].layout, found[name].stride() if name == "expanded" else ()) == (
            expected.layout,
            expected.stride() if name == "expanded" else (),
        )
        assert found[name].to_dense().tolist() == expected.to_dense().tolist(), name
    for wrong, words in (
        (torch.arange(6.0).as_strided((3, 2), (1, 1)), "'w' is a view whose elements overlap"),
        (torch.ones(2, device="meta"), "'w' cannot be broadcast: a tensor on the device meta"),
        (torch.ones(2, dtype=torch.complex64).conj(), "'w' cannot be broadcast, because it is a conjugate view"),
        (torch.ones(3).to_mkldnn(), "'w' cannot be broadcast: a tensor of layout torch._mkldnn"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.broadcast_parameters({"w": wrong}, root_rank=0)


def check_optimizer_state() -> None:
    import sparkvod.torch as hvd

    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1 * (hvd.rank() + 1), momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01 * (hvd.rank() + 1), betas=(0.5, 0.9), amsgrad=True),
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01 * (hvd.rank() + 1))),
    ):
        expected = mlp()
        alone = torch.optim.SGD(expected.parameters(), lr=0.1)
        model = mlp()
        optimizer = make(model.parameters())
        if hvd.rank() == 0:
            # Only the root has made steps.
            for _ in range(3):
                loss_of(model, *data(4)).backward()
                optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        states = hvd.allgather_object(optimizer.state_dict())
        for state in states:
            torch.testing.assert_close(state, states[0], rtol=0, atol=0)
            assert type(state["param_groups"][0]["lr"]) is type(states[0]["param_groups"][0]["lr"])
        optimizer.zero_grad()
        loss_of(model, *data(4)).backward()
        optimizer.step()
        bits = hvd.allgather_object([parameter.detach().numpy().tobytes() for parameter in model.parameters()])
        assert all(theirs == bits[0] for theirs in bits)
        del alone


def check_fresh_optimizer_state() -> None:
    import sparkvod.torch as hvd

    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1 + hvd.rank()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)


def check_state_keeps_its_dtype() -> None:
    import sparkvod.torch as hvd

    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        optimizer.state[parameter] = {"momentum_buffer": torch.full((4,), 0.123456789), "note": "kept"}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    buffer = optimizer.state[parameter]["momentum_buffer"]
    assert buffer.dtype is torch.float32
    assert torch.equal(buffer, torch.full((4,), 0.123456789))
    assert optimizer.state[parameter]["note"] == "kept"


def check_engine_memory() -> None:
    import sparkvod.torch as hvd

    tensor = hvd.empty(3, 5, dtype=torch.bfloat16)
    assert tensor.shape == (3, 5)
    assert not tensor.any()
    tensor += 1
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert torch.equal(tensor, torch.full((3, 5), float(hvd.size()), dtype=torch.bfloat16))
    assert hvd.empty((2, 2)).dtype is torch.float32
    assert hvd.empty(0, 3).shape == (0, 3)
    assert hvd.empty().shape == ()
    with pytest.raises(ValueError, match="complex64"):
        hvd.empty(3, dtype=torch.complex64)


def check_bad_tensors() -> None:
    import sparkvod.torch as hvd

    with pytest.raises(TypeError, match="list was found"):
        hvd.allreduce_([1.0])
    with pytest.raises(ValueError, match=r"complex64.*torch.float32"):
        hvd.allgather(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="to_dense"):
        hvd.allreduce(torch.ones(2, 2).to_sparse())


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_functions(check: str, size: int) -> None:
    SUITE.verify(check, size)
