"""What ``test_driver.py`` runs, kills, and runs again: a driver with two ranks under a ``run_id``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from sparkvod.estimators.callbacks import Callback
from tests.faults import faults


class Slow(Callback):
    """Notes each rank's process and step; sleeps, until it is told that the driver was killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, trainer: Any) -> None:
        (self.folder / f"pid-{trainer.rank}-{os.getpid()}").write_text("")

    def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
        if trainer.rank == 0:
            with open(self.folder / "steps", "a") as file:
                file.write(f"{epoch} {step}\n")
        if not (self.folder / "killed").exists():
            time.sleep(0.1)


def main(folder: Path) -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    spark = builder.config("spark.local.dir", str(folder / "local")).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    df = faults.frame(spark)
    options = {"num_proc": 2, "checkpoint_every": 3}
    weights = faults.fit(df, folder / "store", run_id="run", callbacks=[Slow(folder)], **options)
    whole = faults.fit(df, folder / "store", run_id="whole", **options)
    spark.stop()
    (folder / "same").write_text(str(weights == whole))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
