"""Values of knobs: what cannot be taken is refused here, with the variable's name, and not by the engine."""

from __future__ import annotations

import pytest

from sparkvod import config

WRONG = {
    float: ("nan", "inf", "-inf", "1e300", "-1", "soon", "1e10"),
    int: ("nan", "9223372036854775808", "1" * 5000, "-2", "1.5", "1e3", "many"),
    bool: ("maybe", "2", "nan"),
    str: ("\udcff",),
}


@pytest.mark.parametrize("knob", config.KNOBS.values(), ids=lambda knob: knob.name)
def test_what_a_knob_cannot_take_is_refused_by_name(knob: config.Knob) -> None:
    for text in WRONG[type(knob.default)]:
        with pytest.raises(ValueError, match=f"^{knob.variable}=.* was found, .* was expected"):
            config.get(knob.name, {knob.variable: text})
    assert config.get(knob.name, {knob.variable: ""}) == knob.default
    if knob.default != "":
        assert config.get(knob.name, {knob.variable: str(knob.default)}) == knob.default


def test_truth() -> None:
    knob = next(knob for knob in config.KNOBS.values() if isinstance(knob.default, bool))
    for text, value in (("1", True), (" Yes ", True), ("on", True), ("0", False), ("FALSE", False), ("off", False)):
        assert config.get(knob.name, {knob.variable: text}) is value


def test_a_misspelt_knob_is_found() -> None:
    wrong = {"SPARKVOD_COLECTIVE_TIMEOUT": "1", "SPARKVOD_METRIC_PORT": "1", "SPARKVOD_STALL_CHECK_SECONDS": "1"}
    others = {"SPARKVOD_TLS": "1", "SPARKVOD_HOME": "1", "SPARKVOD_TEST_A": "1", "HOROVOD_TIMELIN": "1", "TLS": "1"}
    assert config.misspelt({**wrong, **others}) == {
        "SPARKVOD_COLECTIVE_TIMEOUT": "SPARKVOD_COLLECTIVE_TIMEOUT",
        "SPARKVOD_METRIC_PORT": "SPARKVOD_METRICS_PORT",
        "SPARKVOD_STALL_CHECK_SECONDS": "SPARKVOD_STALL_CHECK_TIME_SECONDS",
    }


def test_an_unknown_knob_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="log_level"):
        config.get("no_such_knob")
