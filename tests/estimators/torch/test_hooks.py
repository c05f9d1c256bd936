"""Hooks, and optimizers with hooks and attributes of their own, work on ranks as in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.estimators import TorchEstimator
from tests.estimators.backends import Here, write

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")

from sparkvod.estimators.torch import given, packing  # noqa: E402

nn, utils = torch.nn, torch.nn.utils
ROWS = 66
X = np.random.default_rng(3).standard_normal((ROWS, 3)).astype("float32")
Y = (X @ np.array([1, -2, 0.5]) + 0.3).astype("float32")
x, y = torch.from_numpy(X), torch.from_numpy(Y)


class Signed(torch.optim.Optimizer):
    """Has an attribute of its own that hides its class's, and one that refers to its parameters."""

    factor = 1.0

    def __init__(self, params: Any, lr: float, factor: float) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.factor, self.last, self.calls = factor, params[-1], 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        with torch.no_grad():
            self.last.grad.mul_(self.factor)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad


def build() -> tuple[Any, Any]:
    """Returns a model and an optimizer with hooks of all kinds, whose results depend on each."""
    torch.manual_seed(1)
    model = nn.Sequential(utils.parametrizations.weight_norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 1))
    optimizer = Signed(model.parameters(), 0.1, -2.0)
    last = model[2].weight
    model[2].register_forward_hook(lambda module, args, output: output * 0.5)
    model[1].register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,))
    model.register_forward_pre_hook(lambda module, args: (args[0] * model.factor,))
    model.factor = 2.0
    last.register_hook(lambda grad: grad.clamp(-0.1, 0.1))  # of each rank's share, other numbers would come out
    last.register_hook(lambda grad: grad + 0.1 * last.detach())
    optimizer.register_step_pre_hook(lambda *_: setattr(last, "grad", last.grad / (1 + last.grad.norm())))
    optimizer.register_step_post_hook(lambda opt, *_: model[0].bias.data.clamp_(-0.3, 0.3))
    optimizer.register_state_dict_post_hook(lambda opt, state: state | {"calls": opt.calls})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: setattr(opt, "calls", state.pop("calls")))
    return model, optimizer


def flat(model: Any) -> Any:
    return torch.cat([value.detach().double().ravel() for value in model.state_dict().values()])


def train(model: Any, optimizer: Any, steps: int) -> Any:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x)[:, 0], y).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.timeout(120)
def test_ranks_train_with_hooks_as_one_process_does(tmp_path: Path, spark: Any) -> None:
    store = write(tmp_path / "store", row_group_size=8, x=X, y=Y)
    expected = train(*build(), steps=3)
    for place in ({"backend": Here()}, {"num_proc": 2}):
        model, optimizer = build()
        before = flat(model)
        fitted = TorchEstimator(
            model=model,
            optimizer=optimizer,
            loss=nn.MSELoss(),
            feature_cols=["x"],
            label_cols=["y"],
            global_batch_size=ROWS,
            epochs=3,
            store=store,
            verbose=0,
            **place,
        ).fit_on_parquet()
        torch.testing.assert_close(flat(fitted.getModel()), expected, rtol=0, atol=1e-5)
        assert torch.equal(flat(model), before)
    found = fitted.getOptimizer()
    assert (found.factor, found.calls) == (-2.0, 3)
    assert found.last is list(fitted.getModel().parameters())[-1]
    reference = build()
    train(*reference, steps=4)
    torch.testing.assert_close(train(fitted.getModel(), found, 1), flat(reference[0]), rtol=0, atol=1e-5)


def test_a_copy_trains_on_as_the_original() -> None:
    model, optimizer = build()
    train(model, optimizer, 1)
    detached = pickle.loads(pickle.dumps(packing.detach(optimizer, model)))
    other = packing.load_model(packing.dump_model(packing.load_model(packing.dump_model(model))))
    again = detached.attach(other)
    assert torch.equal(train(other, again, 2), train(model, optimizer, 2))
    assert other[2].register_forward_hook(print).id not in model[2]._forward_hooks


def test_a_new_hook_replaces_none_that_came_in_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    content, detached = packing.dump_model(model), packing.detach(optimizer, model)
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)  # as in a new process
    other = packing.load_model(content)
    assert other[2].register_forward_hook(print).id not in model[2]._forward_hooks
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)
    again = detached.attach(other)
    assert again.register_step_pre_hook(print).id not in optimizer._optimizer_step_pre_hooks


def test_an_optimizer_with_a_scheduler_is_taken_and_one_with_another_step_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given.check_optimizer(optimizer)
    assert "step" not in vars(packing.detach(optimizer, model).attach(model))
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match=r"step\(\) of this SGD was replaced in the instance"):
        given.check_optimizer(optimizer)
