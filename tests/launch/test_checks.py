"""Wrong arguments of both launchers: refused in the caller, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy
import pytest

from sparkvod import run_local
from sparkvod.launch import spark as launch_spark
from sparkvod.launch.local import LocalLauncher
from sparkvod.launch.spark import SparkLauncher, run

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_leaks")]


def nothing(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.fixture(params=[run, run_local])
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A launcher that must not get as far as starting something."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it started")

    monkeypatch.setattr("sparkvod.launch.local.LocalWorld", fail)
    monkeypatch.setattr(launch_spark, "_session", fail)
    launched: Callable[..., Any] = request.param
    return launched


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("x",), TypeError, r"fn='x' was found, a function was expected; .*run\(train, args=\(\.\.\.\)\)"),
        ((5,), TypeError, "fn=5 was found, a function was expected"),
        ((nothing(1),), TypeError, r"fn=\(\(1,\), \{\}\) was found, .*not its result"),
        ((nothing, 5), TypeError, r"args=5 was found, a tuple or list was expected; for one argument say args=\(5,\)"),
        ((nothing, "ab"), TypeError, r"args='ab' was found, a tuple or list .*say args=\('ab',\)"),
        ((nothing, {"a": 1}), TypeError, "args={'a': 1} was found, a tuple or list was expected.*kwargs"),
        ((nothing, None), TypeError, "args=None was found"),
        ((nothing, (), [1]), TypeError, r"kwargs=\[1\] was found, a dict of keyword arguments was expected"),
        ((nothing, (), {1: 2}), TypeError, r"kwargs=\{1: 2\} was found, a dict .* whose keys are strings"),
    ],
)
def test_what_cannot_be_called(launch: Callable[..., Any], arguments: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        launch(*arguments)


@pytest.mark.parametrize("value", [1.5, "2", 2.0, True, [2]])
def test_what_is_no_number_of_ranks(launch: Callable[..., Any], value: Any) -> None:
    name = "np" if launch is run_local else "num_proc"
    with pytest.raises(TypeError, match=f"{name}=.* was found, a whole number was expected"):
        launch(nothing, **{name: value})
    with pytest.raises(TypeError, match="num_proc=.* was found, a whole number was expected"):
        (LocalLauncher if launch is run_local else SparkLauncher)(value)


@pytest.mark.parametrize("value", [0, -1])
def test_no_ranks(launch: Callable[..., Any], value: int) -> None:
    name = "np" if launch is run_local else "num_proc"
    with pytest.raises(ValueError, match=f"{name}={value} was found, at least 1 rank was expected"):
        launch(nothing, **{name: value})
    with pytest.raises(ValueError, match=f"num_proc={value} was found, at least 1 rank was expected"):
        (LocalLauncher if launch is run_local else SparkLauncher)(value)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"env": ["A=1"]}, TypeError, r"env=\['A=1'\] was found, a dict of variables was expected"),
        ({"env": {1: "x"}}, TypeError, r"env=\{1: 'x'\} was found, a dict of variables was expected"),
        ({"env": {"A=B": "x"}}, ValueError, "env names a variable 'A=B'"),
        ({"on_event": 3}, TypeError, "on_event=3 was found, a function of one event or None was expected"),
    ],
)
def test_other_arguments(launch: Callable[..., Any], options: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        launch(nothing, **options)


@pytest.mark.parametrize("value", [0, -1, float("nan"), "5"])
def test_times(launch: Callable[..., Any], value: Any) -> None:
    name = "timeout" if launch is run_local else "start_timeout"
    with pytest.raises((ValueError, TypeError), match=f"{name}=.* was found, a number of seconds above 0 was expected"):
        launch(nothing, **{name: value})


def test_what_is_right() -> None:
    assert run_local(nothing, [1], MappingProxyType({"a": 2}), numpy.int64(1), timeout=50) == [((1,), {"a": 2})]
    assert run_local(nothing, (), None, 1, env={"SPARKVOD_TEST": 5, "SPARKVOD_GONE": None}) == [((), {})]  # type: ignore[dict-item]
