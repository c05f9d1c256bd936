"""The contract of all front ends, for Keras on each backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.contracts.front_end import CHECKS, FrontEnd, join
from tests.contracts.worlds import Suite
from tests.keras.test_callbacks import quiet

pytest.importorskip("keras", reason="sparkvod.keras needs keras")


def _on_tensorflow() -> FrontEnd:
    pytest.importorskip("tensorflow", reason="this backend needs tensorflow")
    from tests.tensorflow.test_contract import WrappedEagerFrontEnd

    front = WrappedEagerFrontEnd()
    front.module = "sparkvod.keras"
    return front


def _on_torch() -> FrontEnd:
    pytest.importorskip("torch", reason="this backend needs torch")
    from tests.torch.test_contract import TorchFrontEnd

    front = TorchFrontEnd()
    front.module, front.in_place, front.handles = "sparkvod.keras", False, False
    return front


class JaxFrontEnd(FrontEnd):
    module = "sparkvod.keras"
    in_place = False
    handles = False

    def tensor(self, values: Any, dtype: str) -> Any:
        from jax import numpy as jnp

        return jnp.asarray(np.asarray(values)).astype(dtype)

    def strided(self, values: Any, dtype: str) -> Any:
        return self.tensor(np.asarray(values).T.copy(), dtype).T

    def values(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor.astype("float64") if tensor.dtype.name == "bfloat16" else tensor)

    def dtype(self, tensor: Any) -> str:
        return tensor.dtype.name

    def gradients(self, function: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        import jax

        grads = jax.grad(function, argnums=tuple(range(len(inputs))))(*map(jax.numpy.asarray, inputs))
        return [np.asarray(grad) for grad in grads]


def _on_jax() -> FrontEnd:
    pytest.importorskip("jax", reason="this backend needs jax")
    return JaxFrontEnd()


FRONT_ENDS = {"tensorflow": _on_tensorflow, "torch": _on_torch, "jax": _on_jax}
SUITES: dict[str, Suite] = {}


def _suite(backend: str) -> Suite:
    if backend not in SUITES:
        SUITES[backend] = Suite(CHECKS, [FRONT_ENDS[backend]()], join, env=quiet(backend), timeout=300)
    return SUITES[backend]


@pytest.mark.timeout(320)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backend", list(FRONT_ENDS))
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_contract(check: str, backend: str, size: int, leave_to_full: Callable[[str], None]) -> None:
    if backend != "jax":
        leave_to_full("the backend's own front end passes this contract")
    elif size < 3:
        leave_to_full("three ranks show it")
    _suite(backend).verify(check, size)
