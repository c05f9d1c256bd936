"""What the application tells the timeline about itself: odd names, and a body that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkvod.core import basics
from sparkvod.core.timeline import start_timeline, stop_timeline, timeline_span
from sparkvod.observe import timeline


@pytest.mark.parametrize("wrong", [None, 5, b"forward"])
def test_names_are_strings(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"name=.* of a timeline's slice was found, a string was expected"):
        timeline_span(wrong)
    with pytest.raises(TypeError, match="lane="):
        timeline_span("forward", wrong)


@pytest.mark.timeout(60)
def test_a_body_that_fails_is_a_slice_too(tmp_path: Path) -> None:
    basics.init()
    try:
        start_timeline(tmp_path / "trace.json")
        for name in ("forward", "", 'a "quoted"\n\udcff name'):
            with pytest.raises(KeyError, match="the body's"), timeline_span(name):
                raise KeyError("the body's")
        stop_timeline()
    finally:
        basics.shutdown()
    found = [event["name"] for event in timeline.read(tmp_path / "trace.rank0.json").events if event["ph"] == "X"]
    assert [name for name in found if name != "negotiate"] == ["forward", "", 'a "quoted"\n? name']
