"""A standalone cluster of two workers, and on it a script of a user's through ``spark-submit``.

The executors' Python is a packed environment that came through ``--archives``, the user's own module came through
``--py-files``: nothing of this checkout, nor of this process's environment, is there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import servers

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(folder: Path, full: bool) -> dict[str, Any]:
    packed = servers.packed_environment(folder)
    with servers.standalone(folder / "cluster") as url:
        submit = ["--master", url, "--executor-memory", "512m", "--driver-memory", "1g"]
        submit += ["--archives", f"{packed}#environment", "--py-files", str(servers.MODULE)]
        submit += ["--conf", "spark.pyspark.python=./environment/bin/python"]
        submit += ["--conf", f"spark.pyspark.driver.python={sys.executable}"]
        submit += ["--conf", f"spark.driver.extraJavaOptions={servers.JAVA_OPTIONS}"]
        steps = ["fit", "where", "slots", "together", *(["held"] if full else [])]
        outcome: dict[str, Any] = servers.drive(folder / "driver", steps, {}, submit)
        return outcome


def test_a_submitted_pipeline_gives_the_same_model(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["fit"] == reference
    assert "step 10/10" in found["said"]  # progress comes through the store


def test_executors_run_the_packed_environment(found: dict[str, Any], folder: Path) -> None:
    homes = {rank["folder"] for rank in found["where"]}
    assert len(homes) == 2
    for rank in found["where"]:
        assert Path(rank["folder"]).is_relative_to((folder / "cluster").resolve())
        assert rank["local_size"] == 2
        for name in ("python", "prefix", "sparkvod"):
            assert Path(rank[name]).is_relative_to(Path(rank["folder"]) / "environment"), rank
        assert rank["module"].startswith(rank["folder"])


def test_ranks_that_can_never_start_are_told_in_time(found: dict[str, Any]) -> None:
    assert "not all of 3 tasks had started after 4 s (start_timeout; " in found["slots"]["fit"]["error"]
    assert found["slots"]["fit"]["prepared"] == 0
    assert "0 of 3 tasks had started after 4 s (start_timeout; " in found["slots"]["mailbox"]["error"]
    reported = "2 of 3 ranks have a slot; Spark reports 2 executors with 2 slots, 0 tasks running"
    for refused in found["slots"].values():
        assert "the cluster has too few: give a smaller num_proc, ask for more executors" in refused["error"]
        assert reported in refused["error"]
        assert 4 <= refused["seconds"] < 30


def test_fits_at_once_queue(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["together"] == {"one": reference, "other": reference}


@pytest.mark.usefixtures("only_in_full")
def test_slots_that_another_job_holds(found: dict[str, Any]) -> None:
    assert found["held"]["held"], "the other job had ended too early to show anything"
    for refused in found["held"]["refused"].values():
        assert "2 tasks had started after 2 s" in refused["error"]
        assert "Other jobs may hold the slots" in refused["error"]
        assert refused["seconds"] < 6
    assert found["held"]["ranks"] == 2  # a patient run got them afterwards
    assert found["held"]["other"] == 1  # and the other job was left alone
