"""The contract of all front ends, for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.contracts.front_end import CHECKS, FrontEnd, join
from tests.contracts.worlds import Suite

pytest.importorskip("torch", reason="the PyTorch front end needs torch")


class TorchFrontEnd(FrontEnd):
    module = "sparkvod.torch"

    def tensor(self, values: Any, dtype: str) -> Any:
        import torch

        return torch.tensor(np.asarray(values), dtype=getattr(torch, dtype))

    def strided(self, values: Any, dtype: str) -> Any:
        tensor = self.tensor(np.asarray(values).T.copy(), dtype).t()
        assert not tensor.is_contiguous()
        return tensor

    def values(self, tensor: Any) -> np.ndarray:
        import torch

        detached = tensor.detach()
        return (detached.double() if detached.dtype is torch.bfloat16 else detached).numpy()

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def gradients(self, function: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        import torch

        leaves = [torch.tensor(values, requires_grad=True) for values in inputs]
        function(*leaves).backward()
        return [leaf.grad.numpy() for leaf in leaves]


SUITES = {
    "auto": Suite(CHECKS, [TorchFrontEnd()], join),
    "tcp": Suite(CHECKS, [TorchFrontEnd()], join, env={"SPARKVOD_TRANSPORT": "tcp"}),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("transport", "size"), [("auto", 1), ("auto", 2), ("auto", 3), ("tcp", 3)])
@pytest.mark.parametrize("check", SUITES["auto"].names)
def test_contract(check: str, size: int, transport: str) -> None:
    SUITES[transport].verify(check, size)
