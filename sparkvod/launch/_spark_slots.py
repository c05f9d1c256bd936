"""What can be known of a Spark application before a barrier stage is submitted, by means that Spark Connect has too.

Spark holds a barrier stage back until all its tasks can run at once, silently and for many minutes; with dynamic
allocation it refuses the stage. So both are looked at first, in the session's configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkvod import log
from sparkvod.errors import LaunchError
from sparkvod.launch._checks import check_count

_LOCAL = re.compile(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?$")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,")

_SIZE = re.compile(r"(\d+)\s*(b|k|m|g|t|)b?$")
# Measured with 1 GiB: a driver took 300 MB in all and died of 400 MB, an executor took 150 MB and died of 260 MB.
_DRIVER_COPIES, _EXECUTOR_COPIES = 4, 6

Conf = Callable[[str], str | None]


def conf_of(spark: Any) -> Conf:
    """Returns a reader of the session's configuration that gives None for what is not set."""

    def read(name: str) -> str | None:
        value = spark.conf.get(name, None)
        return None if value is None or value == "" else str(value)

    return read


def is_local(conf: Conf) -> bool:
    """Tells whether the tasks run in threads of the driver's own JVM."""
    return bool(_LOCAL.match(conf("spark.master") or ""))


def is_one_host(conf: Conf) -> bool:
    """Tells whether the tasks run on the driver's host: a local master, or a ``local-cluster`` of executors there."""
    return is_local(conf) or bool(_LOCAL_CLUSTER.match(conf("spark.master") or ""))


def num_slots(conf: Conf) -> int | None:
    """Returns how many tasks can run at once, None when the configuration does not tell."""
    master = conf("spark.master") or ""
    per_task = int(conf("spark.task.cpus") or 1)
    if local := _LOCAL.match(master):
        cores = local.group(1) or "1"
        return ((os.cpu_count() or 1) if cores == "*" else int(cores)) // per_task
    if cluster := _LOCAL_CLUSTER.match(master):
        return int(cluster.group(1)) * (int(cluster.group(2)) // per_task)
    executors, cores = conf("spark.executor.instances"), conf("spark.executor.cores")
    if cores is None and not master.startswith("spark:"):
        cores = "1"  # what YARN and Kubernetes give; a standalone master gives all that it has
    total = conf("spark.cores.max")
    if total is not None and master.startswith("spark:"):
        each = int(cores) if cores else None
        return (int(total) // each) * (each // per_task) if each else int(total) // per_task
    if executors is None or cores is None:
        return None
    return int(executors) * min(int(cores) // per_task, _gpu_slots(conf))


@dataclass(frozen=True)
class Reported:
    """What Spark reports of its executors at one moment.

    Attributes:
        executors: number of those that are registered.
        slots: how many tasks of the default resource profile they can run at once.
        running: number of tasks that they run.
        own: how many of those belong to the job that asks.
    """

    executors: int
    slots: int
    running: int
    own: int

    def __str__(self) -> str:
        return f"{self.executors} executors with {self.slots} slots, {self.running} tasks running"


def reported(spark: Any, tag: str) -> Reported | None:
    """Returns what Spark reports of its executors now; None in Spark Connect, whose clients are not told.

    Args:
        spark: the session.
        tag: tag of the job that asks.
    """
    if "connect" in type(spark).__module__:
        return None
    try:
        context = spark.sparkContext._jsc.sc()
        slots = context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile())
        tracker = context.statusTracker()
        infos = tracker.getExecutorInfos()
        executors = len(infos) if is_local(conf_of(spark)) else max(len(infos) - 1, 0)  # the driver is one of them
        own = sum(_active_tasks(tracker, job) for job in tracker.getJobIdsForTag(tag))
        return Reported(executors, int(slots), sum(info.numRunningTasks() for info in infos), own)
    except Exception as e:  # what is asked is no public interface of Spark's
        log.get("launch.spark").debug("Spark's executors cannot be looked at: %s", e)
        return None


def _active_tasks(tracker: Any, job: int) -> int:
    found = tracker.getJobInfo(job)
    stages = [tracker.getStageInfo(stage) for stage in found.get().stageIds()] if found.isDefined() else []
    return sum(stage.get().numActiveTasks() for stage in stages if stage.isDefined())


def result_bytes(conf: Conf) -> tuple[int, int]:
    """Returns how many bytes of results Spark can carry: of all ranks together, and of those of one executor.

    A JVM holds a result several times over, and one that has no memory left ends: the driver's with the session.
    """
    driver, executor = (nbytes(conf(f"spark.{jvm}.memory") or "1g") for jvm in ("driver", "executor"))
    most = nbytes(conf("spark.driver.maxResultSize") or "1g")
    if is_local(conf):
        executor = driver  # it is the same JVM, and spark.executor.memory means nothing
    total = driver // _DRIVER_COPIES
    return min(total, most or total), executor // _EXECUTOR_COPIES


def nbytes(text: str) -> int:
    """Returns the bytes of one of Spark's sizes, such as ``512m``; a plain number is one of MiB, as for memory."""
    found = _SIZE.match(text.strip().lower())
    if found is None:
        return 1 << 30
    return int(found.group(1)) << {"b": 0, "k": 10, "": 20, "m": 20, "g": 30, "t": 40}[found.group(2)]


def _gpu_slots(conf: Conf) -> int:
    """Tasks per executor that its GPUs allow; more than any number of cores when tasks ask for none."""
    per_task, per_executor = conf("spark.task.resource.gpu.amount"), conf("spark.executor.resource.gpu.amount")
    if per_task is None or per_executor is None or float(per_task) <= 0:
        return 1 << 30
    return int(float(per_executor) / float(per_task))


def check(conf: Conf, num_proc: int | None) -> int:
    """Returns the number of ranks to start: ``num_proc``, else all slots, else Spark's default parallelism.

    Raises:
        LaunchError: dynamic allocation is on, the slots are too few, or nothing tells a number.
        ValueError: ``num_proc`` is below 1.
    """
    if num_proc is not None:
        num_proc = check_count("num_proc", num_proc)
    if (conf("spark.dynamicAllocation.enabled") or "").lower() == "true" and not is_local(conf):
        raise LaunchError(
            "spark.dynamicAllocation.enabled=true was found, and Spark runs no barrier stage with it (SPARK-24942); "
            "start the session with spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances"
        )
    slots = num_slots(conf)
    if num_proc is None:
        known = slots if slots is not None else conf("spark.default.parallelism")
        if known is None:
            raise LaunchError(
                "this session's configuration does not tell how many tasks can run at once; give num_proc"
            )
        num_proc = int(known)
    if slots is not None and num_proc > slots:
        raise LaunchError(
            f"{num_proc} ranks were asked for, and this Spark application has slots for {slots} tasks at once "
            f"(spark.master={conf('spark.master')}, spark.task.cpus={conf('spark.task.cpus') or 1}); all ranks must "
            f"run at once: give num_proc={slots} or less, or start the session with more cores, for example "
            f"{_advice(conf, num_proc)}"
        )
    return num_proc


def _advice(conf: Conf, num_proc: int) -> str:
    cores = num_proc * int(conf("spark.task.cpus") or 1)
    if is_local(conf):
        return f'master("local[{cores}]")'
    if cluster := _LOCAL_CLUSTER.match(conf("spark.master") or ""):
        each = max(int(cluster.group(2)), int(conf("spark.task.cpus") or 1))
        return f'master("local-cluster[{-(-cores // each)},{each},1024]")'
    return f"spark.executor.instances times spark.executor.cores of at least {cores}"
