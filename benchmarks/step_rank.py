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


class OnDevice:
    """A layer that a device of its own computes: the host's cores sleep meanwhile."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        class Computed(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, inputs: Any, weight: Any, bias: Any, seconds: float) -> Any:
                context.seconds = seconds
                context.save_for_backward(weight, bias)
                time.sleep(seconds)
                return inputs.clone()

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                time.sleep(2 * context.seconds)
                return gradient, *(torch.ones_like(saved) for saved in context.saved_tensors), None

        class Layer(nn.Linear):
            def forward(layer, inputs: Any) -> Any:
                return Computed.apply(inputs, layer.weight, layer.bias, self.seconds)

        self.layer = Layer
        self.seconds = 0.0  # of a layer's forward pass; half of what its backward pass takes


def measure(rounds: int, times_allreduce: float = 0.0, on_device: bool = False) -> dict[str, list[float]]:
    """Measures a step, its computation without any communication, and the communication without any computation.

    Args:
        rounds: alternating rounds.
        times_allreduce: so many times as long as the allreduce the computation is made, by the size of the batch; 0:
            the batch has :data:`BATCH` samples.
        on_device: the host's cores do not compute; ``times_allreduce`` is then what counts.

    Returns:
        Seconds by subject, of this rank.
    """
    import torch
    from torch import nn

    import sparkvod.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(0)

    device = OnDevice()
    linear = device.layer if on_device else nn.Linear

    def model() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (linear(WIDTH, WIDTH), nn.ReLU())))

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

    inputs = torch.randn(BATCH, WIDTH)
    for call in (allreduce, in_place, step(alone, local, inputs), step(together, optimizer, inputs)):
        call()
    if times_allreduce > 0:
        wanted = hvd.broadcast_object(times_allreduce * min(timed(allreduce) for _ in range(2)), 0)
        if on_device:
            device.seconds = wanted / LAYERS / 3
        else:
            batch = max(BATCH, round(BATCH * wanted / min(timed(step(alone, local, inputs)) for _ in range(2))))
            inputs = torch.randn(int(hvd.broadcast_object(batch, 0)), WIDTH)
    subjects = {
        COMPUTE: step(alone, local, inputs),
        STEP: step(together, optimizer, inputs),
        ALLREDUCE: allreduce,
        IN_PLACE: in_place,
    }
    return alternate({name: lambda call=call: timed(call) for name, call in subjects.items()}, rounds)


def main(rounds: int, times_allreduce: float, on_device: bool) -> None:
    """Joins the world of the environment."""
    import sparkvod.torch as hvd

    hvd.init()
    told = measure(rounds, times_allreduce, on_device)
    hvd.barrier()
    hvd.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "device")
