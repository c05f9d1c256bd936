"""Models and optimizers as bytes."""

from __future__ import annotations

import copy
import pickle

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
