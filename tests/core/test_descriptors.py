"""A rank that runs out of descriptors at any moment of ``init``: all know within a second whose they are, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.core import descriptors_script
from tests.launch.worlds import scripts

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_leaks")]


@pytest.mark.parametrize(
    ("size", "faulty", "transport"), [(2, 1, "shm"), (3, 0, "tcp"), (3, 0, "shm"), (3, 1, "shm"), (3, 2, "tcp")]
)
def test_all_are_told_whose_descriptors_ran_out(size: int, faulty: int, transport: str) -> None:
    # What no rank can be told is waited for: that another has none left to meet it with.
    knobs = {"SPARKVOD_TRANSPORT": transport, "SPARKVOD_START_TIMEOUT": "40", "SPARKVOD_ADDRESS": "127.0.0.1"}
    told: list[dict[str, Any]] = []
    with scripts([descriptors_script.__file__, str(faulty)], size, **knobs) as ranks:
        for script in ranks:
            out, err = script.communicate(timeout=80)
            assert script.returncode == 0, err[-3000:]
            told.append(json.loads(out))
    for rank, each in enumerate(told):
        assert each["value"] == size
        assert each["held"][0] == each["held"][1]
        assert len(each["heard"]) > (8 if rank == faulty else 4), each["heard"]
        for words in each["heard"]:
            assert f"rank {faulty}" in words
            assert "ulimit -n" in words
            if rank == faulty:
                assert f"may have {descriptors_script.LIMIT} descriptors" in words
    assert max(told[faulty]["seconds"]) < 1.5  # half a second of which it waits to tell the others
