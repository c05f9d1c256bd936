"""Spark Connect: a server in the driver's process, and one of its own; the driver may not touch SparkContext.

The packed environment and the user's module come through ``addArtifacts``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clusters import servers

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    return servers.packed_environment(folder)


def drive(folder: Path, packed: Path, remote: str, steps: list[str]) -> Any:
    artifacts = {"pyfile": [str(servers.MODULE)], "archive": [f"{packed}#environment"]}
    conf = {"spark.remote": remote}
    return servers.drive(folder, steps, conf, artifacts=artifacts, python="environment/bin/python", forbid=True)


@pytest.fixture(scope="module")
def in_process(folder: Path, packed: Path) -> Any:
    return drive(folder / "in-process", packed, "local[2]", ["fit", "where", "slots"])


@pytest.fixture(scope="module")
def served(only_in_full: None, folder: Path, packed: Path) -> Any:
    with servers.connect_server(folder / "server") as url:
        return drive(folder / "driver", packed, url, ["fit", "where", "slots", "held", "together"])


def check(found: dict[str, Any], reference: dict[str, Any]) -> None:
    """Asserts what must hold over any server."""
    assert found["session"] == "pyspark.sql.connect.session"
    assert found["fit"] == reference
    assert "step 10/10" in found["said"]
    for rank in found["where"]:
        for name in ("python", "prefix", "sparkvod"):
            assert "environment" in Path(rank[name]).relative_to(rank["folder"]).parts, rank
        assert rank["module"].startswith(rank["folder"])
    for refused in found["slots"].values():
        assert "slots for 2 tasks at once" in refused["error"]
        assert refused["seconds"] < 1


def test_a_server_in_the_process(in_process: dict[str, Any], reference: dict[str, Any]) -> None:
    check(in_process, reference)


@pytest.mark.usefixtures("only_in_full")
def test_a_server_of_its_own(served: dict[str, Any], reference: dict[str, Any]) -> None:
    check(served, reference)
    assert served["together"] == {"one": reference, "other": reference}
    assert served["held"]["held"]
    for refused in served["held"]["refused"].values():
        assert "2 tasks had started after 2 s" in refused["error"]
    assert (served["held"]["ranks"], served["held"]["other"]) == (2, 1)
