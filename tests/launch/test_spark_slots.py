from __future__ import annotations

import os

import pytest

from sparkvod.errors import LaunchError
from sparkvod.launch import _spark_slots
from sparkvod.launch._spark_worker import rank_order


@pytest.mark.parametrize(
    ("conf", "slots"),
    [
        ({"master": "local"}, 1),
        ({"master": "local[3]"}, 3),
        ({"master": "local[ 3 , 2 ]"}, 3),
        ({"master": "local[*]"}, os.cpu_count()),
        ({"master": "local[4]", "task.cpus": "2"}, 2),
        ({"master": "local-cluster[2,3,1024]"}, 6),
        ({"master": "local-cluster[2,3,1024]", "task.cpus": "2"}, 2),
        ({"master": "yarn"}, None),
        ({"master": "yarn", "executor.instances": "3"}, 3),
        ({"master": "k8s://x", "executor.instances": "3", "executor.cores": "5", "task.cpus": "2"}, 6),
        ({"master": "spark://x:1"}, None),
        ({"master": "spark://x:1", "executor.instances": "2"}, None),
        ({"master": "spark://x:1", "executor.instances": "2", "executor.cores": "2"}, 4),
        ({"master": "spark://x:1", "cores.max": "7"}, 7),
        ({"master": "spark://x:1", "cores.max": "7", "executor.cores": "2", "task.cpus": "1"}, 6),
        (
            {
                "master": "yarn",
                "executor.instances": "2",
                "executor.cores": "8",
                "executor.resource.gpu.amount": "2",
                "task.resource.gpu.amount": "1",
            },
            4,
        ),
    ],
)
def test_slots(conf: dict[str, str], slots: int | None) -> None:
    assert _spark_slots.num_slots(lambda name: conf.get(name.removeprefix("spark."))) == slots


def check(num_proc: int | None, **conf: str) -> int:
    named = {"spark." + name.replace("_", "."): value for name, value in conf.items()}
    return _spark_slots.check(named.get, num_proc)


def test_the_number_of_ranks() -> None:
    assert check(None, master="local[3]") == 3
    assert check(2, master="local[3]") == 2
    assert check(None, master="yarn", default_parallelism="5") == 5
    assert check(9, master="yarn") == 9
    with pytest.raises(LaunchError, match="does not tell how many tasks .* give num_proc"):
        check(None, master="yarn")


def test_too_few_slots() -> None:
    with pytest.raises(LaunchError, match=r"4 ranks .* slots for 2 .*num_proc=2.*instances times .*at least 4"):
        check(4, master="yarn", executor_instances="2")


def test_the_advice_is_of_the_same_kind_of_master() -> None:
    with pytest.raises(LaunchError, match=r'3 ranks .* slots for 2 .*master\("local-cluster\[3,1,1024\]"\)'):
        check(3, master="local-cluster[2,1,512]")
    with pytest.raises(LaunchError, match=r'master\("local-cluster\[2,2,1024\]"\)'):
        check(3, master="local-cluster[1,2,512]")


@pytest.mark.parametrize(
    ("master", "one_host", "local"),
    [
        ("local", True, True),
        ("local[*]", True, True),
        ("local-cluster[2,1,512]", True, False),
        ("spark://127.0.0.1:7077", False, False),
        ("yarn", False, False),
        ("", False, False),
    ],
)
def test_where_the_tasks_run(master: str, one_host: bool, local: bool) -> None:
    conf = {"spark.master": master}.get
    assert (_spark_slots.is_one_host(conf), _spark_slots.is_local(conf)) == (one_host, local)


def test_dynamic_allocation() -> None:
    with pytest.raises(LaunchError, match="dynamicAllocation.enabled=true was found.*enabled=false"):
        check(2, master="yarn", **{"dynamicAllocation_enabled": "true"})
    # Spark itself ignores it on a local master.
    assert check(2, master="local[2]", **{"dynamicAllocation_enabled": "true"}) == 2


@pytest.mark.parametrize(
    ("addresses", "order"),
    [
        (["a:1"], [0]),
        (["a:1", "b:1", "a:2", "b:2"], [0, 2, 1, 3]),
        (["b:1", "a:1", "b:2"], [0, 2, 1]),
        (["::1:5", "x", "::1:6"], [0, 2, 1]),
    ],
)
def test_ranks_are_grouped_by_host_in_partition_order(addresses: list[str], order: list[int]) -> None:
    assert rank_order(addresses) == order


@pytest.mark.parametrize(
    ("conf", "together", "executor"),
    [
        ({}, 256 << 20, (1 << 30) // 6),
        ({"spark.driver.memory": "8g"}, 1 << 30, (1 << 30) // 6),
        ({"spark.driver.memory": "6g", "spark.master": "local[2]"}, 1 << 30, 1 << 30),
        ({"spark.driver.memory": "512", "spark.executor.memory": "3072m"}, 128 << 20, 512 << 20),
        ({"spark.driver.memory": "8gb", "spark.driver.maxResultSize": "0"}, 2 << 30, (1 << 30) // 6),
        ({"spark.driver.maxResultSize": "100m"}, 100 << 20, (1 << 30) // 6),
    ],
)
def test_what_spark_can_carry(conf: dict[str, str], together: int, executor: int) -> None:
    assert _spark_slots.result_bytes(conf.get) == (together, executor)
