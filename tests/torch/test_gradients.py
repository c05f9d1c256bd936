"""Where gradients lie, and the unusual models: unused, frozen, shared, sparse, strided and late parameters."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from tests.contracts.worlds import Suite
from tests.torch.models import assert_equal, data, loss_of, mlp
from tests.torch.test_optimizer import sgd


def join() -> None:
    import sparkvod.torch as hvd

    hvd.init()


def _step(model: nn.Module, optimizer: Any, weight: float = 1.0) -> None:
    optimizer.zero_grad()
    (loss_of(model, *data(4)) * weight).backward()
    optimizer.step()


def check_views() -> None:
    import sparkvod.torch as hvd

    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    _step(model, optimizer)
    first = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    _step(model, optimizer)
    second = [parameter.grad for parameter in model.parameters()]
    # The same memory again: the gradients were pointed back to their buckets.
    assert (hvd.size() == 1) or all(a is b for a, b in zip(first, second, strict=True))
    optimizer.zero_grad(set_to_none=False)
    assert all(a is b.grad for a, b in zip(second, model.parameters(), strict=True))
    assert all(not gradient.any() for gradient in second)
    loss_of(model, *data(4)).backward()
    optimizer.step()
    assert all(a is b.grad for a, b in zip(second, model.parameters(), strict=True))


def check_no_hooks_when_alone() -> None:
    import sparkvod.torch as hvd

    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    assert all(bool(hook) == (hvd.size() > 1) for hook in hooks)
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)


class Branches(nn.Module):
    """Uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return torch.stack([self.branches[branch](x).sum() for branch in used]).sum()


def check_unused_parameters() -> None:
    import sparkvod.torch as hvd

    model = Branches()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1), op=hvd.Sum)
    x = torch.ones(1, 4)
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in model.branches[2].parameters()]
        optimizer.zero_grad()
        # Branch 0 on all ranks, branch 1 on rank 0 only, branch 2 on none.
        model(x, [0, 1] if hvd.rank() == 0 else [0]).backward()
        optimizer.step()
        assert model.branches[2].weight.grad is None
        assert all(torch.equal(a, b) for a, b in zip(before, model.branches[2].parameters(), strict=True))
        torch.testing.assert_close(model.branches[0].weight.grad, torch.full((1, 4), float(hvd.size())))
        torch.testing.assert_close(model.branches[1].weight.grad, torch.ones(1, 4))
    optimizer.zero_grad()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


def check_zero_grad_between() -> None:
    import sparkvod.torch as hvd

    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    loss_of(model, *data(4)).backward()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="between backward"):
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, *data(4)).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    _step(model, optimizer)


def check_shared_parameters() -> None:
    import sparkvod.torch as hvd

    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * (hvd.rank() + 1)).backward()
        own = shared.weight.grad.clone() if hvd.size() == 1 else None
        optimizer.step()
    expected = torch.autograd.grad(model(torch.ones(2, 4)).sum(), shared.weight)[0]
    assert own is None or own.shape == expected.shape
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).sum() * (hvd.rank() + 1)).backward()
    optimizer.synchronize()
    torch.testing.assert_close(shared.weight.grad, expected * (hvd.size() + 1) / 2)


def check_frozen_and_thawed() -> None:
    import sparkvod.torch as hvd

    n, rank = hvd.size(), hvd.rank()
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    x = torch.ones(1, 2)
    for frozen, trained in ((1, 0), (0, 1)):
        model[frozen].weight.requires_grad_(False)
        model[trained].weight.requires_grad_(True)
        for _ in range(2):
            optimizer.zero_grad()
            ((model[0](x) + model[1](x)).sum() * (rank + 1)).backward()
            optimizer.step()
            assert model[frozen].weight.grad is None
            torch.testing.assert_close(model[trained].weight.grad, torch.full((2, 2), n * (n + 1) / 2))
    added = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    for _ in range(2):
        optimizer.zero_grad()
        (added.sum() * (rank + 1)).backward()
        optimizer.step()
        torch.testing.assert_close(added.grad, torch.full((3,), n * (n + 1) / 2))


def check_parameters_removed_or_replaced() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return  # nothing is exchanged, so there is nothing that could be forgotten
    for change in (lambda held: held.pop(), lambda held: held.__setitem__(0, nn.Parameter(torch.ones(2, 2)))):
        model = nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        change(optimizer.param_groups[0]["params"])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(ValueError, match="may be added to it only"):
                optimizer.step()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.grad, torch.full((2, 2), float(hvd.size())))


def check_sparse() -> None:
    import sparkvod.torch as hvd

    n = hvd.size()
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=True, op=hvd.Sum)
    optimizer.zero_grad()
    model(torch.tensor([hvd.rank(), 9])).sum().backward()
    optimizer.step()
    assert n == 1 or model.weight.grad.layout is torch.strided
    expected = torch.zeros(10, 3)
    expected[:n] = 1
    expected[9] = n
    torch.testing.assert_close(model.weight.grad.to_dense(), expected)
    del optimizer
    if n > 1:
        model = nn.Embedding(10, 3, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"sparse_coo.*sparse_as_dense=True"):
            model(torch.tensor([1])).sum().backward()


def check_channels_last() -> None:
    import sparkvod.torch as hvd

    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    x = torch.randn(2, 3, 8, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.synchronize()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient * hvd.size(), atol=1e-3, rtol=1e-4)
            assert parameter.grad.stride() == parameter.stride()


def check_changed_dtype() -> None:
    import sparkvod.torch as hvd

    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    model.double()
    optimizer.zero_grad()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 2), float(hvd.size()), dtype=torch.float64))


def check_create_graph() -> None:
    import sparkvod.torch as hvd

    model = nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward(create_graph=True)
    optimizer.step()
    assert model.weight.grad.shape == (1, 2)
    assert hvd.size() == 1 or not model.weight.grad.requires_grad


def check_copies() -> None:
    import sparkvod.torch as hvd

    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Sum, groups=2)
    _step(model, optimizer, 1 / hvd.size())
    other, twin = copy.deepcopy((model, optimizer))
    restored_model, restored = pickle.loads(pickle.dumps((model, optimizer)))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    alone_model = copy.deepcopy(model)
    alone = sgd(alone_model.parameters())
    alone.load_state_dict(torch.load(saved))
    for each, each_optimizer in ((model, optimizer), (other, twin), (restored_model, restored)):
        assert type(each_optimizer) is type(optimizer)
        for _ in range(2):
            _step(each, each_optimizer, 1 / hvd.size())
    for _ in range(2):
        alone.zero_grad()
        loss_of(alone_model, *data(4)).backward()
        alone.step()
    for each in (model, other, restored_model):
        assert_equal(each, alone_model)


def check_wrapped_again() -> None:
    import sparkvod.torch as hvd

    n = hvd.size()
    model = nn.Linear(2, 2)
    first = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    second = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    for optimizer in (second, first, first, second):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.grad, torch.full((2, 2), float(n)))
    if n > 1:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="another DistributedOptimizer"):
            first.step()
        second.step()
    del first, second, optimizer
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


def check_two_optimizers() -> None:
    import sparkvod.torch as hvd

    n = hvd.size()
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), op=hvd.Sum) for m in models]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, model in enumerate(models):
            (model(torch.ones(1, 2)).sum() * (number + 1)).backward()
        for number, optimizer in enumerate(optimizers):
            optimizer.step()
            torch.testing.assert_close(models[number].weight.grad, torch.full((2, 2), float(n * (number + 1))))


def check_scheduler() -> None:
    import sparkvod.torch as hvd

    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum)
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ran: list[str] = []
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    optimizer.zero_grad()
    (model(torch.ones(1, 2)).sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    early.step()
    late.step()
    assert ran == ["post"]
    assert optimizer.param_groups[0]["lr"] == 0.25
    n = hvd.size()
    torch.testing.assert_close(model.weight.grad, torch.full((2, 2), n * (n + 1) / 2))


def check_init_again() -> None:
    import sparkvod.torch as hvd
    from sparkvod.errors import NotInitializedError

    n = hvd.size()
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    for _ in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            torch.testing.assert_close(model.weight.grad, torch.full((2, 2), float(n)))
        hvd.shutdown()
        model.weight.grad.add_(1)  # engine memory outlives the engine
        with pytest.raises(NotInitializedError):
            optimizer.step()
        hvd.init()


def check_arguments() -> None:
    import sparkvod.torch as hvd

    model = mlp()
    named = list(model.named_parameters())
    plain = sgd(model.parameters())
    for options, words in (
        ({"named_parameters": named[1:]}, "1 parameters of the optimizer"),
        ({"named_parameters": [*named, named[0]]}, r"0\.weight more than once"),
        ({"named_parameters": list(model.parameters())}, "tuples were expected"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor=2.0"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
        ({"op": hvd.Adasum}, "op=Adasum"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": "all"}, "groups='all'"),
        ({"groups": [[named[0][1], named[0][1]]]}, "twice in groups"),
        ({"groups": [["0.weight"]]}, "str was found in groups"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(plain, **options)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(plain, num_groups=2)
    optimizer = hvd.DistributedOptimizer(plain, named, groups=[[named[0][1], named[5][1]], [named[2][1]]])
    _step(model, optimizer)
    if hvd.size() > 1:
        whole = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        with pytest.raises(ValueError, match=r"'noname.0.0' of torch.complex64"):
            hvd.DistributedOptimizer(torch.optim.SGD([whole], lr=0.1))


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_BUCKET_BYTES": "1024", "SPARKVOD_FIRST_BUCKET_BYTES": "64"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_gradients(check: str, size: int) -> None:
    SUITE.verify(check, size)
