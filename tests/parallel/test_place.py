"""What launchers say in the environment, and what devices= means."""

from __future__ import annotations

import pytest
import torch

from hasten import HastenError
from hasten.parallel import choose_devices, find_place, open_world
from hasten.parallel.place import first_host

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "4711",
}


def test_no_launcher() -> None:
    assert find_place({}) is None
    assert find_place({"RANK": "1"}) is None


def test_torchrun() -> None:
    place = find_place(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "node7",
            "MASTER_PORT": "1234",
        }
    )
    assert place is not None
    assert (place.rank, place.local_rank, place.size, place.local_size) == (5, 1, 8, 4)
    assert (place.node_rank, place.num_nodes, place.address, place.port) == (1, 2, "node7", 1234)
    assert place.launcher == "torchrun"


def test_srun() -> None:
    place = find_place(SRUN)
    assert place is not None
    assert (place.rank, place.local_rank, place.size, place.local_size) == (5, 1, 8, 4)
    assert (place.node_rank, place.num_nodes, place.address, place.launcher) == (1, 2, "gpu07", "slurm")
    other_task = find_place({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert other_task is not None
    assert other_task.port == place.port


def test_nodes_of_srun_have_the_tasks_that_are_listed_for_them() -> None:
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_STEP_NUM_NODES": "3", "SLURM_LOCALID": "1"}
    for node, tasks in (("0", 3), ("1", 3), ("2", 2)):
        place = find_place({**uneven, "SLURM_NODEID": node})
        assert place is not None
        assert place.local_size == tasks


def test_a_launcher_that_a_rank_has_started_is_its_own() -> None:
    """The variable of the outer one is left over: nobody serves a store for these ranks."""
    outer = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1234", "HASTEN_LAUNCHED": "1234"}
    place, inner = find_place(outer), find_place({**outer, "MASTER_PORT": "29500"})
    assert place is not None
    assert inner is not None
    assert (place.launcher, inner.launcher) == ("hasten", "torchrun")


def test_shell_of_a_slurm_batch_script_is_no_rank() -> None:
    batch = {key: value for key, value in SRUN.items() if "STEP" not in key}
    assert find_place(batch) is None
    assert find_place({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-09,12],login", "gpu07"), ("a[3,5]-ib", "a3-ib"), ("r1n[1-2]", "r1n1")],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "wrong", [{"RANK": "x"}, {"RANK": "2"}, {"LOCAL_RANK": "2"}, {"MASTER_PORT": "0"}, {"WORLD_SIZE": ""}]
)
def test_contradictions_are_said(wrong: dict[str, str]) -> None:
    with pytest.raises(HastenError, match="launcher"):
        find_place({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **wrong})


def test_flags_that_contradict_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HastenError, match="torchrun started 4 processes"):
        open_world("cpu", 2)
    with pytest.raises(HastenError, match="num_nodes=2"):
        open_world("cpu", 4, num_nodes=2)


def test_machines_need_a_launcher() -> None:
    with pytest.raises(HastenError, match="torchrun --nnodes 3"):
        open_world("cpu", 1, num_nodes=3)
    with pytest.raises(HastenError, match="unknown"):
        open_world("cpu", 1, strategy="fsdp3")


@pytest.mark.parametrize(("devices", "count"), [("auto", 1), (-1, 1), (3, 3), ("2", 2)])
def test_processes_on_a_cpu(devices: int | str, count: int) -> None:
    assert choose_devices("cpu", devices) == [torch.device("cpu")] * count


@pytest.mark.parametrize("wrong", [0, -2, True, "two", "", [], [0, 0], [-1], 1.5, [0, 1], "0,1"])
def test_devices_that_make_no_sense_on_a_cpu(wrong: object) -> None:
    with pytest.raises(HastenError, match="devices="):
        choose_devices("cpu", wrong)  # type: ignore[arg-type]


def test_devices_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for devices, indices in (("auto", [0, 1, 2, 3]), (2, [0, 1]), ([1, 3], [1, 3]), ("1,", [1]), (-1, [0, 1, 2, 3])):
        assert [device.index for device in choose_devices("auto", devices)] == indices
    with pytest.raises(HastenError, match="GPU 4"):
        choose_devices("cuda", 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(HastenError, match="sees no GPU"):
        choose_devices("gpu", 1)
    with pytest.raises(HastenError, match="unknown"):
        choose_devices("tpu", 1)
