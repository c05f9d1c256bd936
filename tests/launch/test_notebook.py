"""Interrupts in a real notebook's kernel, which replaces the signal handler that pyspark installs in a script."""

from __future__ import annotations

import os
import queue
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JAVA_OPTIONS

pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")
manager = pytest.importorskip("jupyter_client.manager", reason="no notebook's kernel is installed")
pytest.importorskip("ipykernel", reason="no notebook's kernel is installed")
pytestmark = pytest.mark.timeout(170)
ROOT = Path(__file__).resolve().parents[2]

SETUP = f"""
import threading, time
import torch
from pyspark.sql import SparkSession
import sparkvod
from sparkvod.estimators import TorchEstimator
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "1g")
spark = builder.config("spark.driver.extraJavaOptions", {JAVA_OPTIONS!r}).getOrCreate()
spark.sparkContext.setLogLevel("OFF")

def slow(batches):
    for batch in batches:
        time.sleep(60)
        yield batch

def tell_when_a_job_runs():
    def look():
        while not running():
            time.sleep(0.1)
        print("a Spark job runs", flush=True)
    threading.Thread(target=look).start()

df = spark.range(64).selectExpr("double(id) / 64 as x", "double(id) / 32 as y")
slow_df = df.mapInArrow(slow, df.schema)

class Sleeping(torch.nn.MSELoss):
    def forward(self, *values):
        time.sleep(0.5)
        return super().forward(*values)

def fit(data, loss, epochs, callbacks=()):
    net = torch.nn.Linear(1, 1)
    return TorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=loss, feature_cols=["x"],
        label_cols=["y"], batch_size=8, epochs=epochs, num_proc=2, callbacks=list(callbacks),
    ).fit(data)

def running():
    return len(spark.sparkContext.statusTracker().getActiveJobsIds())

def forever():
    print("a rank runs", flush=True)
    time.sleep(60)
"""


class Kernel:
    """A kernel with what the tests need of it: cells that are waited for, or interrupted once they said something."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._manager = manager.KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=environment)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, code: str) -> str:
        """Runs a cell to its end; returns what it printed."""
        self._client.execute(code)
        printed, error = self._until_idle(60)
        assert not error, error
        return printed

    def interrupt(self, code: str, said: str) -> tuple[str, float]:
        """Runs a cell, interrupts it when it has printed ``said``; returns its error and the seconds till its end."""
        self._client.execute(code)
        self._until_idle(60, said)
        began = time.monotonic()
        self._manager.interrupt_kernel()
        _, error = self._until_idle(60)
        return error, time.monotonic() - began

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def _until_idle(self, seconds: float, said: str | None = None) -> tuple[str, str]:
        printed, error, until = "", "", time.monotonic() + seconds
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=max(until - time.monotonic(), 0.1))
            except queue.Empty:
                raise AssertionError(f"the cell did not come so far: {printed[-3000:]}") from None
            content: dict[str, Any] = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            elif message["msg_type"] == "error":
                error += re.sub(r"\x1b\[[\d;]*m", "", "\n".join([content["ename"], *content["traceback"]]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                assert said is None, f"the cell ended first: {printed[-3000:]}{error}"
                return printed, error
            if said is not None and said in printed:
                return printed, error


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    try:
        made.run(SETUP)
        yield made
        made.run("spark.stop()")
    finally:
        made.close()


def test_interrupts_end_what_runs_and_the_next_fit_starts_normally(kernel: Kernel) -> None:
    for cell, said in (
        ("tell_when_a_job_runs(); fit(slow_df, torch.nn.MSELoss(), 1)", "a Spark job runs"),
        ("fit(df, Sleeping(), 1000)", "epoch 1/1000"),
        ("sparkvod.run(forever, num_proc=2)", "a rank runs"),
        ("sparkvod.run_local(forever, np=2)", "a rank runs"),
    ):
        error, seconds = kernel.interrupt(cell, said)
        assert error.startswith("KeyboardInterrupt"), error
        assert len(re.findall(r"^KeyboardInterrupt\b.*Traceback", error, re.M)) == 1, error  # once, over no other error
        assert seconds < 6, cell  # 2 s on a machine where nothing else runs; what is interrupted goes on for 60 s
        assert kernel.run("time.sleep(0.2); print(running())").strip() == "0", cell
    kernel.run("model = fit(df, torch.nn.MSELoss(), 2)")
    assert kernel.run("print(len(model.getHistory()))").strip() == "2"
