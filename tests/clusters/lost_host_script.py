"""The driver of ``test_lost_host.py``: a fit with a rank on each of two hosts, one of which is lost in mid-epoch."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from sparkvod.errors import WorkerError
from sparkvod.estimators import SparkBackend
from tests.clusters import servers
from tests.faults import faults


class Going(faults.Fault):
    """Says when both hosts are in the middle of an epoch, and goes on slowly, for as long as the test may take."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "from outside")

    def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
        if (epoch, step) == faults.AT:
            (self.folder / f"ready-{trainer.rank}").write_text(socket.gethostname())
        if (epoch, step) >= faults.AT:
            time.sleep(0.05)


def main(folder: Path, url: str, address: str, knob: str) -> None:
    """Fits, and leaves as JSON what came of it."""
    conf = {
        **servers.CONF,
        "spark.master": url,
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.executor.memory": "512m",
        "spark.local.dir": str(folder / "local"),
    }
    builder = SparkSession.builder
    for name, value in conf.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    backend = SparkBackend(num_proc=2, env={"SPARKVOD_COLLECTIVE_TIMEOUT": knob}, verbose=0)
    told: dict[str, Any] = {}
    try:
        faults.fit(faults.frame(spark), folder / "store", backend=backend, callbacks=[Going(folder)], epochs=200)
    except WorkerError as error:
        told = {"time": time.time(), "error": str(error), "type": type(error).__name__, "kind": error.kind}
        told |= {"rank": error.rank, "host": error.host, "lost_peer": error.lost_peer}
    (there,) = (int(path.name[6:]) for path in folder.glob("ready-*") if path.read_text() == "north")
    told["left"] = [pid for pid in faults.await_none_busy(folder) if pid in faults.of_rank(folder, there)]
    (folder / "told.json").write_text(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
