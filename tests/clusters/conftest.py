"""What the tests of clusters share: the outcome on a local master, which the others must equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for one cluster; nothing that was started in it may outlive it."""
    pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if not shutil.which("java"):
        pytest.skip("no Java was found, and Spark needs one")
    made = tmp_path_factory.mktemp("cluster")
    yield made
    assert servers.left_behind(made) == []


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``fit`` and ``transform`` give on a classic ``local[2]``."""
    found = servers.drive(tmp_path_factory.mktemp("reference"), ["fit"], {"spark.master": "local[2]"})
    assert found["session"] == "pyspark.sql.session"
    outcome: dict[str, Any] = found["fit"]
    assert outcome["loss"][-1] < outcome["loss"][0]
    assert sum(outcome["trained"]) == 2 * outcome["rows"]  # two epochs
    return outcome


@pytest.fixture(scope="session")
def only_in_full(leave_to_full: Callable[[str], None]) -> None:
    """Skips what ``make test`` has no time for; clusters ask for it too, so that they are not even started."""
    leave_to_full("it takes a cluster of its own")
