"""One rank of the bench of the tuner: steps that exchange many small tensors; prints its times as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from benchmarks.harness import alternate

BETWEEN_SECONDS = 50e-6  # of computation, from one tensor to the next
TUNING_STEPS = 1060  # after 1,030 the tuner has ended
STEPS = 30  # of a round
DEFAULT, TUNED = "default", "tuned"


class Steps:
    """Steps in one world after the other, as environment variables say."""

    def __init__(self, tensors: int, nbytes: int) -> None:
        import torch

        import sparkvod.torch as hvd

        torch.set_num_threads(1)
        self.hvd = hvd
        self.tensors = [torch.ones(nbytes // 4) for _ in range(tensors)]

    def step(self) -> None:
        """Starts a sum for each tensor when it has been computed, and waits for all."""
        handles = []
        for number, tensor in enumerate(self.tensors):
            until = time.perf_counter() + BETWEEN_SECONDS
            while time.perf_counter() < until:
                pass
            handles.append(self.hvd.allreduce_async_(tensor, name=f"gradient.{number}", op=self.hvd.Average))
        for handle in handles:
            self.hvd.synchronize(handle)

    def world(self, steps: int, variables: dict[str, str]) -> tuple[list[float], dict[str, Any]]:
        """Returns the seconds of each step in a world of its own, and the knobs in use at its end."""
        from sparkvod import config

        config.set_environment(variables)
        self.hvd.init()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        tunables = self.hvd.stats()["tunables"]
        self.hvd.barrier()
        self.hvd.shutdown()
        config.set_environment(dict.fromkeys(variables))
        if not all(bool((tensor == 1).all()) for tensor in self.tensors):
            raise AssertionError("averages of ones are not ones")
        return times, tunables


def measure(tensors: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """Tunes, and then measures what was found beside the defaults, in alternating worlds.

    Args:
        tensors: of a step.
        nbytes: of each.
        rounds: how often.

    Returns:
        Seconds of a step, this rank's median of each round, by who; and the values that were found, by knob.
    """
    from sparkvod import config

    steps = Steps(tensors, nbytes)
    _, found = steps.world(TUNING_STEPS, {"SPARKVOD_AUTOTUNE": "1"})
    known = {config.KNOBS[name].variable: str(value) for name, value in found.items() if name in config.KNOBS}

    def median(variables: dict[str, str]) -> float:
        return statistics.median(steps.world(STEPS, variables)[0][STEPS // 3 :])

    times = alternate({DEFAULT: lambda: median({}), TUNED: lambda: median(known)}, rounds)
    return {"times": times, "found": known}


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
