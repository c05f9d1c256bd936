"""A backward pass after ``synchronize()`` is reduced too."""

from __future__ import annotations

import pytest
import torch

import sparkvod

SEQUENCES = ("backward step", "backward synchronize zero_grad backward step", "backward synchronize backward step")


def weights_after(sequences: tuple[str, ...]) -> list[list[float]]:
    """Returns the weights after each sequence of calls; each rank's data are its own."""
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    found = []
    for number, sequence in enumerate(sequences):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        names = [(f"{number}.{name}", parameter) for name, parameter in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=names)
        for call in sequence.split():
            if call == "backward":
                model(torch.full((2, 3), 1.0 + hvd.rank())).pow(2).sum().backward()
            else:
                getattr(optimizer, call)()
        found.append(model.weight.flatten().tolist())
    return found


@pytest.mark.timeout(90)
def test_a_backward_after_synchronize_is_reduced() -> None:
    first, second = sparkvod.run_local(
        weights_after, (SEQUENCES,), np=2, timeout=60, env={"SPARKVOD_COLLECTIVE_TIMEOUT": "20"}
    )
    assert first == second
    assert first[1] == first[0]
    assert first[2] != first[0]
