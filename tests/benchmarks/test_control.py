"""The growth that the control plane's bench promises."""

from __future__ import annotations

import math

import pytest

from benchmarks import control


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5])
def test_growth_is_the_power_of_log_n(power: float) -> None:
    noise = (0.9, 1.0, 1 / 0.9)
    values = {ranks: [noisy * 50 * math.log2(ranks) ** power for noisy in noise] for ranks in control.RANKS}
    assert control.growth(values) == pytest.approx(power)
