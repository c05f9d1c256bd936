"""What ``test_faults.py`` runs in a process of its own: a local cluster whose executor is killed in mid-epoch."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from sparkvod.errors import WorkerError
from tests.faults import faults

OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Restarts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "starts again from its last checkpoint" in record.getMessage()


def session(folder: Path) -> Any:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": OPTIONS,
        "spark.executor.extraJavaOptions": OPTIONS,
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        # how soon a barrier stage looks again for the slots of an executor that starts anew; 15 s otherwise
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    }
    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(folder: Path) -> None:
    spark = session(folder)
    spark.sparkContext.setLogLevel("OFF")
    df, store, options = faults.frame(spark), folder / "store", {"num_proc": 2, "checkpoint_every": 3}
    whole = faults.fit(df, store, run_id="whole", **options)

    (once := folder / "once").mkdir()
    told: dict[str, Any] = {}
    try:
        faults.fit(df, store, run_id="broken", callbacks=[faults.Fault(once, "executor")], **options)
    except WorkerError as error:
        at = faults.fault_time(once)
        told["fit"] = time.time() - at
        told |= {"error": str(error), "kind": error.kind, "lost_peer": error.lost_peer}
        told["left"] = faults.await_none_busy(once)
        told["others"] = [note["time"] - at for rank, note in faults.errors(once).items() if rank != 1]

    (again := folder / "again").mkdir()
    restarts = Restarts()
    logging.getLogger("sparkvod").addHandler(restarts)
    broken = faults.fit(
        df, store, run_id="restarted", callbacks=[faults.Fault(again, "executor")], max_restarts=1, **options
    )
    spark.stop()
    told |= {"equal": broken == whole, "restarts": restarts.count}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
