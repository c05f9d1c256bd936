"""Models and optimizers as bytes."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")

from sparkvod.estimators.torch import packing  # noqa: E402


def trained(kind: str = "Adam") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    groups = [{"params": model[1].parameters(), "lr": 0.5}, {"params": [model[0].weight]}]
    optimizer = getattr(torch.optim, kind)(groups, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_model_comes_back_with_a_class_of_this_function() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, x = Doubled(3, 1), torch.ones(2, 3)
    assert torch.equal(packing.load_model(packing.dump_model(model))(x), model(x))


def test_a_script_module_comes_back() -> None:
    model, x = torch.jit.script(torch.nn.Linear(3, 1)), torch.ones(2, 3)
    assert torch.equal(packing.load_model(packing.dump_model(model))(x), model(x))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop"])
def test_an_optimizer_goes_on_with_another_copy_of_its_model(kind: str) -> None:
    model, optimizer = trained(kind)
    detached = pickle.loads(pickle.dumps(packing.detach(optimizer, model)))
    other = packing.load_model(packing.dump_model(model))
    attached = detached.attach(other)
    assert type(attached) is type(optimizer)
    assert [group["lr"] for group in attached.param_groups] == [0.5, 0.1]
    for m, o in ((model, optimizer), (other, attached)):
        o.zero_grad()
        m(torch.ones(2, 3)).sum().backward()
        o.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_detaching_changes_neither() -> None:
    model, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    packing.detach(optimizer, model).attach(copy.deepcopy(model)).param_groups[0]["lr"] = 9
    assert optimizer.param_groups[0]["params"][0] is model[1].weight
    torch.testing.assert_close(optimizer.state_dict(), before)


def test_parameters_are_taken_by_place_only_if_none_is_the_models() -> None:
    model = torch.nn.Linear(3, 1)
    apart = copy.deepcopy(torch.optim.SGD(model.parameters(), lr=0.1))
    attached = packing.detach(apart, model).attach(model)
    assert attached.param_groups[0]["params"][0] is model.weight
    mixed = torch.optim.SGD([model.weight, torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"parameters of shapes \[\(1,\)\] that are not the model's"):
        packing.detach(mixed, model)


PARAMETRIZED = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
    "two of one layer": lambda layer: torch.nn.utils.parametrizations.weight_norm(
        torch.nn.utils.parametrizations.weight_norm(layer), "bias", dim=0
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_a_parametrized_module_comes_back_and_trains(name: str) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Tanh(), PARAMETRIZED[name](torch.nn.Linear(3, 2))), torch.randn(4, 3)
    model(x)  # so that tensors are there that are no leaves of the graph
    other = packing.load_model(packing.dump_model(model))
    other = packing.load_model(packing.dump_model(other))  # what came back can be sent again
    assert list(other.state_dict()) == list(model.state_dict())
    for step in range(2):
        for one in (model, other):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            one(x).pow(2).sum().backward()
            optimizer.step()
        for mine, expected in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, expected), (name, step)


def test_hooks_of_parameters_and_modules_come_along() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)), torch.ones(2, 3)
    model[0].weight.register_hook(lambda grad: grad * 0)
    model[1].bias.register_hook(lambda grad: grad + model[0].weight.detach().sum())  # of the same model
    model[1].bias.requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(more=torch.ones(1)))
    other = packing.load_model(packing.dump_model(model))
    assert "more" in other.state_dict()
    assert not other[1].bias.requires_grad
    for one in (model, other):
        one[1].bias.requires_grad_(True)
        one(x).sum().backward()
    for mine, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)
    assert not other[0].weight.grad.any()
    with torch.no_grad():
        other[0].weight.zero_()
    other.zero_grad()
    other(x).sum().backward()
    assert torch.equal(other[1].bias.grad, torch.tensor([2.0]))  # the hook sees the weights of the model that came back


class Lookahead(torch.optim.SGD):
    """Has state of its own, and wraps another optimizer whose groups it shares."""

    period = 0

    def __init__(self, params: object, lr: float, period: int) -> None:
        super().__init__(params, lr=lr)
        self.period, self.calls = period, 0
        self.inner = torch.optim.Adam(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: object = None) -> None:
        self.calls += 1
        self.inner.step()
        for p, slow in self.slow.items() if self.calls % self.period == 0 else ():
            p.data.copy_(slow.lerp_(p.data, 0.5))


def count(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    optimizer.hooked = getattr(optimizer, "hooked", 0) + 1


def test_an_optimizers_own_attributes_and_hooks_come_along() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = Lookahead(model.parameters(), 0.1, period=2)
    optimizer.register_step_post_hook(count)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # leaves a wrapper of step() behind
    other = packing.load_model(packing.dump_model(model))
    attached = pickle.loads(pickle.dumps(packing.detach(optimizer, model))).attach(other)
    assert attached.period == 2
    assert attached.param_groups is attached.inner.param_groups
    assert set(attached.slow) == set(other.parameters())
    assert attached.state_dict()["more"] == 1
    for m, o in ((model, optimizer), (other, attached)) * 3:
        o.zero_grad()
        m(torch.ones(2, 3)).sum().backward()
        o.step()
    for mine, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, expected)
    assert (attached.calls, attached.hooked) == (3, 3)
    # What a checkpoint and a result hold: the state, and besides it the attributes.
    resumed = packing.detach(optimizer, model).attach(other)
    resumed.calls, resumed.hooked = 0, 0
    resumed.load_state_dict(attached.state_dict())
    packing.load_own(resumed, other, packing.dump_own(attached, other))
    assert (resumed.calls, resumed.hooked) == (3, 3)
    assert resumed.inner.param_groups is resumed.param_groups
    assert packing.dump_own(torch.optim.Adam(model.parameters()), model) == b""
    optimizer.lock = threading.Lock()
    with pytest.raises(TypeError, match="optimizer cannot be pickled .*attributes and hooks"):
        packing.detach(optimizer, model)
