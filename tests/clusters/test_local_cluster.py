"""``local-cluster[2,1,1024]``: two executors, each a JVM of its own, on the driver's host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clusters import servers

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("only_in_full")]


@pytest.fixture(scope="module")
def found(only_in_full: None, folder: Path) -> dict[str, Any]:
    conf = {"spark.master": "local-cluster[2,1,1024]"}
    artifacts = {"pyfile": [str(servers.MODULE)]}
    steps = ["fit", "where", "slots", "together"]
    outcome: dict[str, Any] = servers.drive(folder / "driver", steps, conf, artifacts=artifacts)
    return outcome


def test_the_model_is_the_same(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["fit"] == reference
    assert found["together"] == {"one": reference, "other": reference}


def test_lines_and_progress_need_no_mailbox(found: dict[str, Any]) -> None:
    assert "step 10/10" in found["said"]
    assert "executors' logs" not in found["said"]


def test_ranks_are_in_two_executors(found: dict[str, Any]) -> None:
    assert len({rank["folder"] for rank in found["where"]}) == 2
    assert [rank["local_size"] for rank in found["where"]] == [2, 2]
    assert all(rank["module"].startswith(rank["folder"]) for rank in found["where"])  # through addArtifacts


def test_too_many_ranks_are_refused_at_once(found: dict[str, Any]) -> None:
    for refused in found["slots"].values():
        assert "slots for 2 tasks at once" in refused["error"]
        assert 'master("local-cluster[3,1,1024]")' in refused["error"]
        assert refused["seconds"] < 1
