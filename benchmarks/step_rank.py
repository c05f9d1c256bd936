"""One rank of a training-like step of 100 tensors and 25 million parameters; by itself it prints its times as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import alternate

LAYERS, WIDTH = 50, 707  # 100 tensors, 25 million parameters
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
BATCH = 64
COMPUTE, STEP, ALLREDUCE = "compute alone", "step", "allreduce alone"
IN_PLACE = "allreduce alone, one tensor in engine memory"


def measure(rounds: int, times_allreduce: float = 0.0) -> dict[str, list[float]]:
    """Measures a step, its computation without any communication, and the communication without any computation.

    Args:
        rounds: alternating rounds.
        times_allreduce: so many times as long as the allreduce the computation is made, by the size of the batch; 0:
            the batch has :data:`BATCH` samples.

    Returns:
        Seconds by subject, of this rank.
    """
    import torch
    from torch import nn

    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def model() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    alone, together = model(), model()
    local = torch.optim.SGD(alone.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=1e-6), named_parameters=together.named_parameters()
    )
    gradients = [torch.zeros_like(parameter) for parameter in alone.parameters()]
    whole = hvd.empty(PARAMETERS)

    def allreduce() -> None:
        hvd.grouped_allreduce_(gradients, name="gradients", op=hvd.Sum)

    def in_place() -> None:
        hvd.allreduce_(whole, name="whole", op=hvd.Sum)

    def step(net: nn.Module, by: Any, inputs: Any) -> Callable[[], None]:
        def run() -> None:
            by.zero_grad()
            net(inputs).square().mean().backward()
            by.step()

        return run

    def timed(call: Callable[[], None]) -> float:
        for tensor in (*gradients, whole):
            tensor.zero_()
        hvd.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    batch = BATCH
    inputs = torch.randn(batch, WIDTH)
    for call in (allreduce, in_place, step(alone, local, inputs), step(together, optimizer, inputs)):
        call()
    if times_allreduce > 0:
        wanted = times_allreduce * min(timed(allreduce) for _ in range(2))
        batch = max(BATCH, round(BATCH * wanted / min(timed(step(alone, local, inputs)) for _ in range(2))))
        batch = int(hvd.broadcast_object(batch, 0))
        inputs = torch.randn(batch, WIDTH)
    subjects = {
        COMPUTE: step(alone, local, inputs),
        STEP: step(together, optimizer, inputs),
        ALLREDUCE: allreduce,
        IN_PLACE: in_place,
    }
    return alternate({name: lambda call=call: timed(call) for name, call in subjects.items()}, rounds)


def main(rounds: int, times_allreduce: float) -> None:
    """Joins the world of the environment."""
    import sparkvod.torch as hvd

    hvd.init()
    told = measure(rounds, times_allreduce)
    hvd.barrier()
    hvd.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
