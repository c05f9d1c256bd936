"""Training, objects and states among the ranks of a process set, while the others do something else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch
from torch import nn

from sparkvod.core import process_sets
from sparkvod.errors import MismatchError
from tests.contracts.worlds import Suite
from tests.torch.models import assert_equal, data, loss_of, mlp

# The ranks of the set by the number of ranks in the world; None for the global set.
MEMBERS = {1: None, 2: [1], 3: [0, 2]}
THE_SET: Any = None


def join() -> None:
    import sparkvod.torch as hvd

    global THE_SET
    torch.set_num_threads(1)
    hvd.init()
    ranks = MEMBERS[hvd.size()]
    THE_SET = hvd.global_process_set if ranks is None else hvd.add_process_set(ranks)


def check_objects() -> None:
    import sparkvod.torch as hvd

    rank, ranks = hvd.rank(), THE_SET.ranks
    root = ranks[-1]
    for name in (None, "named"):
        if THE_SET.included():
            assert hvd.broadcast_object({"of": rank}, root, name=name, process_set=THE_SET) == {"of": root}
            assert hvd.allgather_object(rank * "x", name=name, process_set=THE_SET) == [r * "x" for r in ranks]
        # The world's own are not mixed up with them.
        assert hvd.broadcast_object(rank, hvd.size() - 1, name=name) == hvd.size() - 1
    if THE_SET.included() and len(ranks) < hvd.size():
        outside = next(r for r in range(hvd.size()) if r not in ranks)
        for spread in (
            lambda: hvd.broadcast_object(1, outside, process_set=THE_SET),
            lambda: hvd.broadcast_parameters([torch.zeros(1)], outside, process_set=THE_SET),
            lambda: hvd.broadcast(torch.zeros(1), outside, process_set=THE_SET),
        ):
            with pytest.raises(ValueError, match=rf"root_rank={outside} was found, one of the process set's ranks"):
                spread()


def check_a_rank_outside_is_refused() -> None:
    import sparkvod.torch as hvd

    if THE_SET.included():
        return
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for what, call in {
        "broadcast_object": lambda: hvd.broadcast_object(1, process_set=THE_SET),
        "allgather_object": lambda: hvd.allgather_object(1, process_set=THE_SET),
        "broadcast_parameters": lambda: hvd.broadcast_parameters(model.state_dict(), 0, process_set=THE_SET),
        "broadcast_object ": lambda: hvd.broadcast_optimizer_state(optimizer, 0, process_set=THE_SET),
        "DistributedOptimizer": lambda: hvd.DistributedOptimizer(optimizer, process_set=THE_SET),
    }.items():
        words = rf"{what.strip()} was asked for on rank {hvd.rank()} with the process set of the ranks \[.*included"
        with pytest.raises(ValueError, match=words):
            call()


def check_what_is_no_set() -> None:
    import sparkvod.torch as hvd

    plain = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="add_process_set"):
        hvd.DistributedOptimizer(plain, process_set=hvd.ProcessSet([0, 7]))
    for call in (
        lambda wrong: hvd.DistributedOptimizer(plain, process_set=wrong),
        lambda wrong: hvd.allreduce(torch.ones(1), process_set=wrong),
        lambda wrong: hvd.alltoall_async(torch.ones(1), process_set=wrong),
        lambda wrong: hvd.remove_process_set(wrong),
    ):
        for wrong, said in (([0], r"\[0\]"), (0, "0"), ("0", "'0'"), (None, "None")):
            with pytest.raises(TypeError, match=f"process_set={said} was found, a ProcessSet"):
                call(wrong)
    for wrong in (5, "01", [0], [None]):
        with pytest.raises(ValueError, match="process_sets=.* was found, a list of ProcessSet, 'dynamic' or None"):
            process_sets.check(wrong)
    for wrong in (5, "01", [0.5], None, [None]):
        with pytest.raises(TypeError, match="was found for the ranks of a process set, a list of whole numbers"):
            hvd.add_process_set(wrong)
    foreign = pickle.loads(pickle.dumps(THE_SET))
    assert foreign.process_set_id == THE_SET.process_set_id
    if foreign.process_set_id:
        foreign._ranks = [5]  # as one that another program has registered under the same number
        assert foreign.process_set_id is None


def check_training() -> None:
    import sparkvod.torch as hvd

    if not THE_SET.included():
        # Meanwhile the others train among all or none.
        return
    size, place = THE_SET.size(), THE_SET.rank()
    for options in ({}, {"gradient_predivide_factor": 2.0}, {"backward_passes_per_step": 2}):
        passes = options.get("backward_passes_per_step", 1)
        model = mlp(seed=hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=THE_SET, **options)
        hvd.broadcast_parameters(model.state_dict(), THE_SET.ranks[0], process_set=THE_SET)
        hvd.broadcast_optimizer_state(optimizer, THE_SET.ranks[0], process_set=THE_SET)
        expected = mlp(seed=THE_SET.ranks[0])
        alone = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            shares = [data(4, seed=100 * step + rank) for rank in range(size)]
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(model, *shares[place]).backward()
            optimizer.step()
            alone.zero_grad()
            sum(loss_of(expected, *share) * passes / size for share in shares).backward()
            alone.step()
        assert_equal(model, expected)
        twin = pickle.loads(pickle.dumps((model, optimizer)))
        for each_model, each in (copy.deepcopy((model, optimizer)), twin):
            loss_of(each_model, *data(4)).backward()
            each.step()


def check_agreement_is_the_sets() -> None:
    import sparkvod.torch as hvd

    if not THE_SET.included() or THE_SET.size() == 1:
        return
    differs = THE_SET.ranks[-1]
    model = nn.Linear(2, 3 if hvd.rank() == differs else 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=THE_SET)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(MismatchError, match=rf"parameter 0: rank 0 has .*\[4, 2\].*rank {differs} has .*\[3, 2\]"):
        optimizer.step()


def check_sets_beside_each_other() -> None:
    import sparkvod.torch as hvd

    # A rank in two sets trains two models, in the order that it likes; ranks of one set alone, one.
    if hvd.size() < 3:
        return
    second = hvd.add_process_set([1, 2])
    models = {}
    for members in (THE_SET, second) if hvd.rank() == 2 else (THE_SET if hvd.rank() == 0 else second,):
        model = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        models[tuple(members.ranks)] = model, hvd.DistributedOptimizer(optimizer, process_set=members)
    for _ in range(2):
        for model, optimizer in models.values():
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (hvd.rank() + 1)).backward()
        for _, optimizer in reversed(models.values()):
            optimizer.step()
    for ranks, (model, _) in models.items():
        mean = sum(rank + 1.0 for rank in ranks) / len(ranks)
        torch.testing.assert_close(model.weight.data, torch.full((2, 2), -2 * mean))
    hvd.remove_process_set(second)


def check_a_removed_set_and_a_new_world() -> None:
    import sparkvod.torch as hvd

    if hvd.size() == 1:
        return
    model = mlp()
    optimizer = None
    if THE_SET.included():
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=THE_SET)
    hvd.barrier()  # one that leaves ends the world for all
    hvd.shutdown()
    hvd.init()
    if optimizer is not None:
        with pytest.raises(ValueError, match="add_process_set"):
            optimizer.step()
    hvd.add_process_set(THE_SET)
    if optimizer is not None:
        optimizer.zero_grad()
        loss_of(model, *data(4)).backward()
        optimizer.step()
    hvd.barrier()


CHECKS = [
    check_objects,
    check_a_rank_outside_is_refused,
    check_what_is_no_set,
    check_training,
    check_agreement_is_the_sets,
    check_sets_beside_each_other,
    check_a_removed_set_and_a_new_world,
]
SUITE = Suite(CHECKS, setup=join, env={"SPARKVOD_COLLECTIVE_TIMEOUT": "20"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_process_sets(check: str, size: int) -> None:
    SUITE.verify(check, size)
