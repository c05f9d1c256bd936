"""Worlds under ``spark.executor.pyspark.memory``, which limits the address space of each Python worker.

The limit is a setting of the whole session, so the test runs in a session of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_MIB = 3072
SCRIPT = f"""
import json, sparkvod
from pyspark.sql import SparkSession
from tests.launch.test_pyspark_memory import reduce_under_a_limit

spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    .config("spark.executor.pyspark.memory", "{LIMIT_MIB}m").getOrCreate()
)
for transport in ("shm", "tcp"):
    env = {{"SPARKVOD_TRANSPORT": transport}}
    print(json.dumps(sparkvod.run(reduce_under_a_limit, num_proc=2, env=env, verbose=0)))
spark.stop()
"""


def reduce_under_a_limit() -> tuple[int, list[str], int]:
    """Returns the limit of this worker's address space, the ways that collectives took, and a sum over the ranks."""
    import resource

    from sparkvod.core import basics, objects

    basics.init()
    total = sum(objects.allgather_object(basics.rank() + 1))
    return resource.getrlimit(resource.RLIMIT_AS)[0], list(basics.stats()["collectives"]), total


@pytest.mark.timeout(320)
def test_worlds_come_together_under_it_over_shared_memory_and_tcp() -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    shm, tcp = (json.loads(line) for line in process.stdout.splitlines() if line.startswith("[["))
    for results, transport in ((shm, "shm"), (tcp, "tcp")):
        for limit, ways, total in results:
            assert (limit, total) == (LIMIT_MIB << 20, 3)
            assert ways
            assert all(f"/{transport}/" in way for way in ways)
