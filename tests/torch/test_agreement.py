"""Ranks whose models or options differ are told so before anything is summed, at once, and the world goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from sparkvod import config
from sparkvod.errors import MismatchError
from tests.contracts.worlds import Suite, run_in_world
from tests.torch.models import Halved


def join() -> None:
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def _refused(model: nn.Module, words: str, named: Any = None, **options: Any) -> None:
    import sparkvod.torch as hvd

    named = list(model.named_parameters()) if named is None else named
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, **options)
    begun = time.monotonic()
    for _ in range(2):  # a second step is refused as well
        optimizer.zero_grad()
        sum(parameter.sum() for _, parameter in named).backward()
        with pytest.raises(MismatchError, match=words):
            optimizer.step()
        optimizer.zero_grad()
    assert time.monotonic() - begun < 5
    # Nothing is left on its way.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def _mine(make: Callable[[bool], Any]) -> Any:
    # Rank 1 is the one that differs.
    import sparkvod.torch as hvd

    return make(hvd.rank() == 1)


def check_shapes() -> None:
    words = r"parameter 0: ranks? .*'weight' \[(2, 4|4, 2)\] float32, rank 1 has 'weight' \[4, 2\] float32"
    _refused(_mine(lambda other: nn.Linear(2, 4) if other else nn.Linear(4, 2)), words)
    _refused(_mine(lambda other: nn.Linear(4, 4 if other else 3)), r"parameter 0: .*\[3, 4\].*rank 1 has .*\[4, 4\]")


def check_order() -> None:
    named = [(name, nn.Parameter(torch.zeros(3))) for name in "abcd"]
    order = _mine(lambda other: [0, 2, 1, 3] if other else [0, 1, 2, 3])
    _refused(nn.Module(), r"parameter 1: ranks? .*'b' \[3\] float32, rank 1 has 'c'", [named[at] for at in order])


def check_number() -> None:
    _refused(_mine(lambda other: nn.Linear(4, 1, bias=not other)), r"parameter 1: .*'bias' \[1\].*rank 1 has none")


def check_dtype() -> None:
    _refused(_mine(lambda other: nn.Linear(2, 1).to(torch.float64 if other else torch.float32)), "rank 1 .*float64")


def check_frozen() -> None:
    model = nn.Linear(4, 1)
    model.weight.requires_grad_(_mine(lambda other: not other))
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    _refused(model, r"parameter 0: .*'weight'.*rank 1 has 'bias'", named)


def check_options() -> None:
    import sparkvod.torch as hvd

    for option, words in (
        ({"op": _mine(lambda other: hvd.Sum if other else hvd.Average)}, "op: .*Average, rank 1 has Sum"),
        ({"gradient_predivide_factor": _mine(lambda other: 2.0 if other else 4.0)}, "gradient_predivide_factor="),
        ({"compression": _mine(lambda other: hvd.Compression.fp16 if other else hvd.Compression.bf16)}, "rank 1 has f"),
        ({"groups": _mine(lambda other: 2 if other else 1)}, r"bucket 0 \(see groups=\): .* 2 parameters"),
    ):
        _refused(nn.Linear(4, 1), words, **option)


def check_compressor_of_the_users() -> None:
    words = r"parameter 0: .*\[4, 2\] float32"
    _refused(_mine(lambda other: nn.Linear(2, 4) if other else nn.Linear(4, 2)), words, compression=Halved)


def check_parameters_added_later() -> None:
    import sparkvod.torch as hvd

    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(_mine(lambda other: 4 if other else 3)))]})
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(MismatchError, match=r"parameter 2: .*\[3\].*rank 1 has .*\[4\]"):
            optimizer.step()


def check_parameters_that_only_one_rank_adds() -> None:
    import sparkvod.torch as hvd

    for compression in (hvd.Compression.none, Halved):
        for thaws in (False, True):
            model = nn.Linear(2, 2)
            frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
            optimizer = torch.optim.SGD([*model.parameters(), frozen], lr=1.0)
            optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if hvd.rank() == 1 and thaws:
                frozen.requires_grad_(True)
            elif hvd.rank() == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
            begun = time.monotonic()
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                with pytest.raises(
                    MismatchError, match=r"parameter 2: ranks? 0.* ha(s|ve) none, rank 1 has '.*' \[3\]"
                ):
                    optimizer.step()
            assert time.monotonic() - begun < 5
            # Once all have it, they go on.
            if hvd.rank() != 1 and thaws:
                frozen.requires_grad_(True)
            elif hvd.rank() != 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
            added = optimizer.param_groups[-1]["params"][-1]
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() + added.sum() * hvd.rank()).backward()
            optimizer.step()
            torch.testing.assert_close(added.grad, torch.full((3,), (hvd.size() - 1) / 2))


def check_a_parameter_that_is_added_too_late() -> None:
    import sparkvod.torch as hvd

    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for computed in (True, False):
        added = nn.Parameter(torch.zeros(3))
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() + (added.sum() if computed else 0)).backward()
        optimizer.add_param_group({"params": [added]})
        if computed:
            with pytest.raises(ValueError, match=r"shape \[3\] with a gradient.*expected before backward"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() + added.sum() * hvd.rank()).backward()
        optimizer.step()
        torch.testing.assert_close(added.grad, torch.full((3,), (hvd.size() - 1) / 2))


def check_an_optimizer_that_only_one_rank_makes() -> None:
    import sparkvod.torch as hvd

    if hvd.rank() == 0:
        alone = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(5, 5).parameters(), lr=1.0))
        alone.zero_grad()
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.grad, torch.full((2, 2), float(hvd.size())))


def check_agreement_costs_the_first_step_only() -> None:
    import sparkvod.torch as hvd

    def collectives() -> dict[str, int]:
        found: dict[str, int] = {}
        for key, each in hvd.stats()["collectives"].items():
            found[key.split("/")[0]] = found.get(key.split("/")[0], 0) + each["calls"]
        return found

    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for step in range(3):
        before = collectives()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        made = {key: count - before.get(key, 0) for key, count in collectives().items()}
        assert made["allreduce"] == 1
        assert made.get("allgather", 0) == (step == 0)


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_COLLECTIVE_TIMEOUT": "20"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_agreement(check: str, size: int) -> None:
    SUITE.verify(check, size)


def _with_a_knob_of_its_own(variable: str) -> str:
    import sparkvod.torch as hvd

    hvd.init()
    config.set_environment({variable: "1024" if hvd.rank() else "64"})
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(MismatchError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("variable", ["SPARKVOD_BUCKET_BYTES", "SPARKVOD_FIRST_BUCKET_BYTES"])
def test_a_knob_that_differs_is_named(variable: str) -> None:
    env = {"SPARKVOD_COLLECTIVE_TIMEOUT": "20", "SPARKVOD_FIRST_BUCKET_BYTES": "64"}
    found = run_in_world(_with_a_knob_of_its_own, (variable,), 2, env, timeout=50)
    assert found[0] == found[1]
    assert f"{variable}: rank 0 has 64, rank 1 has 1024" in found[0]
