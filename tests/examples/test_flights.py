"""The demo on a small part of its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("torch", reason="the demo trains with PyTorch")
pytest.importorskip("pandas", reason="the demo reads its data with pandas")

import flights  # noqa: E402


@pytest.fixture(scope="module")
def some() -> flights.Flights:
    try:
        return flights.load(12_000)
    except SystemExit as error:
        pytest.skip(str(error))


def test_the_table(some: flights.Flights, capsys: pytest.CaptureFixture[str]) -> None:
    table = some.table
    assert len(table) == 12_000
    assert not table.isna().any().any()
    assert 0.1 < table["held_out"].mean() < 0.25
    assert some.means.shape == some.scales.shape == (len(flights.NUMBERS),)
    assert (some.scales > 0).all()
    assert len(some.kinds) == len(flights.CODES)


@pytest.fixture
def sent_whole() -> Iterator[None]:
    """The script runs as __main__, whose definitions travel to the workers; those of a module would not."""
    cloudpickle.register_pickle_by_value(flights)
    yield
    cloudpickle.unregister_pickle_by_value(flights)


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("sent_whole")
def test_it_learns(spark: Any, some: flights.Flights) -> None:
    df = flights.to_spark(spark, some)
    model = flights.train(df, some, epochs=8, num_proc=2)
    errors = flights.errors(model, df, some)
    assert errors["this model"] < 0.5 * errors["best constant"]
    assert errors["straight line on the departure delay"] < errors["best constant"]
    validation = model.getHistory()[-1]["validation"]["loss"]
    assert validation**0.5 == pytest.approx(errors["this model"], rel=1e-4)
