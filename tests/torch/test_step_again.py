"""Odd sequences of calls: each leaves what one process on all ranks' data would have, or is refused on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the PyTorch front end needs torch")

import torch

from tests.contracts.worlds import run_in_world
from tests.torch.models import Halved

# B backward, S synchronize, T step, K step within skip_synchronize, Z zero_grad, z zero_grad(set_to_none=False),
# N gradients set to None, M the model's zero_grad, C gradients clipped in place, D through .data, R gradients replaced,
# P by zeros, H the model converted to half precision and back, W the optimizer's state loaded.
EXACT = (
    "B T",
    "B S Z B T",
    "B S z B T",
    "B S Z B S K",
    "B S N B T",
    "B S K Z B T",
    "B S B T",
    "B S T",
    "B S S K",
    "B T B T",
    "B S Z T",
    "B S Z B S Z B S K",
    "B S C K Z B S C K",
    "B S D K z B S D K",
    "B S C K z B S C K",
    "B S W Z B T",
    "B S R K",
    "B T M B T",
    "T B T",
    "S Z B T",
    "Z T B T",
)
REFUSED = {
    "B K": "within skip_synchronize",
    "B K Z B T": "within skip_synchronize",
    "B S B K": "within skip_synchronize",
    "B S Z B K": "within skip_synchronize",
    "B T Z B K": "within skip_synchronize",
    "B B T": "backward_passes_per_step=1",
    "B Z": "zero_grad",
    "B N T": "was changed, replaced or cleared",
    "B M T": "was changed, replaced or cleared",
    "B C T": "is being reduced",
    "B C S K": "is being reduced",
    "B T Z B C T": "is being reduced",
    "B T z B C T": "is being reduced",
    "B D T": "is being reduced",
    "B T z B D T": "is being reduced",
    "B H T": "is being reduced",
    "B T Z B R T": "is being reduced",
    "B P T": "was changed, replaced or cleared",
}


def train(sequence: str, rows: torch.Tensor, make: Any, scale: float = 1.0) -> torch.nn.Linear:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make(model)
    for call in sequence.split():
        if call == "B":
            (model(rows).pow(2).sum() * scale).backward()
        elif call == "T":
            optimizer.step()
        elif call == "S" and hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        elif call == "K":
            if hasattr(optimizer, "skip_synchronize"):
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        elif call in "Zz":
            optimizer.zero_grad(set_to_none=call == "Z")
        elif call == "M":
            model.zero_grad()
        elif call == "C":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif call == "D":
            for parameter in model.parameters():
                parameter.grad.data.mul_(0.5)
        elif call == "H":
            model.half().float()
        elif call == "W":
            optimizer.load_state_dict(optimizer.state_dict())
        elif call in "NPR":
            for parameter in model.parameters():
                made = {"N": lambda _: None, "P": torch.zeros_like, "R": lambda old: old.grad * 0.5}[call]
                parameter.grad = made(parameter)
    return model


def sequences_on_a_rank(compression: str) -> list[str]:
    """Returns what is wrong."""
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    size = hvd.size()
    everybody = [torch.full((2, 3), 1.0 + rank) for rank in range(size)]

    def distributed(model: torch.nn.Linear) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        chosen = Halved if compression == "own" else getattr(hvd.Compression, compression)
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=chosen)

    def alone(model: torch.nn.Linear) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    wrong = []
    for sequence in EXACT:
        if compression == "own" and "T" in sequence[: max(sequence.find("B"), 0)] + sequence[-3:].replace("B T", ""):
            continue  # a compressor of the user's makes zeros of gradients that nobody has
        mine = train(sequence, everybody[hvd.rank()], distributed)
        # The average over the ranks is one process's gradient of everything, divided.
        expected = train(sequence, torch.cat(everybody), alone, 1 / size)
        for parameter, other in zip(mine.parameters(), expected.parameters(), strict=True):
            if not torch.allclose(parameter, other, atol=1e-2 if compression == "bf16" else 1e-5):
                wrong.append(f"{sequence}: {parameter.tolist()} instead of {other.tolist()}")
    for sequence, words in REFUSED.items() if size > 1 else ():
        try:
            train(sequence, everybody[hvd.rank()], distributed)
            wrong.append(f"{sequence}: was not refused")
        except (AssertionError, ValueError) as error:
            if words not in str(error):
                wrong.append(f"{sequence}: {error}")
    if hvd.allreduce(torch.ones(1), op=hvd.Sum).item() != size:
        wrong.append("the world did not go on")
    return wrong


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("size", "compression"), [(1, "none"), (2, "none"), (3, "none"), (2, "bf16"), (2, "own")])
def test_sequences(size: int, compression: str) -> None:
    env = {"SPARKVOD_COLLECTIVE_TIMEOUT": "20"}
    found = run_in_world(sequences_on_a_rank, (compression,), size, env)
    assert found == [[]] * size


def accumulated_on_a_rank() -> list[str]:
    """Returns what is wrong with sequences of two backward passes per step."""
    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    wrong = []
    for sequence, refused in (("B K", True), ("B B S B K", True), ("B B S K Z B B T", False), ("B S B T", False)):
        optimizers: list[Any] = []

        def make(model: torch.nn.Linear, made: list[Any] = optimizers) -> Any:
            plain = torch.optim.SGD(model.parameters(), lr=0.01)
            made.append(hvd.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=2))
            return made[-1]

        try:
            model = train(sequence, torch.full((2, 3), 1.0 + hvd.rank()), make)
            everywhere = hvd.allgather_object(model.weight.tolist())
            if refused or everywhere[0] != everywhere[-1]:
                wrong.append(f"{sequence}: {everywhere}")
        except AssertionError as error:
            if not refused:
                wrong.append(f"{sequence}: {error}")
    return wrong


@pytest.mark.timeout(90)
def test_accumulated_passes() -> None:
    env = {"SPARKVOD_COLLECTIVE_TIMEOUT": "20"}
    assert run_in_world(accumulated_on_a_rank, size=2, env=env) == [[], []]
