"""Findings on the machine around the training, on evidence made up."""

from __future__ import annotations

import pytest

from hasten.doctor.findings.blocking_checkpoint import BlockingCheckpoint
from hasten.doctor.findings.blocking_log import BlockingLog
from hasten.doctor.findings.garbage_collected import GarbageCollected
from hasten.doctor.findings.remote_read_ahead import RemoteReadAhead
from hasten.doctor.findings.slow_disk import SlowDisk
from hasten.doctor.findings.small_shm import SmallShm
from hasten.doctor.findings.threads_oversubscribed import ThreadsOversubscribed
from hasten.evidence import Event, Evidence, HowKnown, ProcessEnvironment, Severity, Stages
from tests.doctor.findings.made import event, evidence, only, use

SLOW = {"data": 0.020}  # waits 20 of 30 ms
READS = (Stages(0, 4, read=0.018, decode=0.002),)
NFS = ProcessEnvironment(threads=4, data_folder="/mnt/data", filesystem="nfs4")
SPINNING = ProcessEnvironment(threads=4, data_folder="/data", filesystem="ext4", rotational=True)
SSD = ProcessEnvironment(threads=4, data_folder="/data", filesystem="ext4", rotational=False)
THRASHING = use(waiting=0.2, disk_read=20e6, cpu=0.5)  # of four cores: 0.8 of one waits


# -- slow_disk, remote_read_ahead, small_shm --------------------------------------------------------------


def test_a_network_file_system_that_is_waited_for_is_named() -> None:
    """Reading is nine tenths of a batch."""
    finding = only(SlowDisk.findings(evidence(phases=SLOW, surroundings=NFS, stages=READS)), "slow_disk")
    assert "nfs4" in finding.what
    assert "copy /mnt/data" in finding.fix
    assert finding.worth == pytest.approx(2 / 3, rel=0.03)


def test_a_spinning_disk_that_is_waited_for_is_named() -> None:
    """The CPU waits for it, and it is being read."""
    finding = only(SlowDisk.findings(evidence(phases=SLOW, surroundings=SPINNING, use=THRASHING)), "slow_disk")
    assert "a spinning disk, read at 20 MB/s" in finding.what
    assert (
        "cannot keep up"
        in only(SlowDisk.findings(evidence(phases=SLOW, surroundings=SSD, use=THRASHING)), "slow_disk").what
    )


@pytest.mark.parametrize(
    "made",
    [
        evidence(surroundings=NFS, stages=READS),  # nobody waits
        evidence(phases=SLOW, surroundings=NFS, stages=(Stages(0, 4, read=0.001, decode=0.019),)),  # decoding
        evidence(phases=SLOW, surroundings=SPINNING, use=use(waiting=0.0, disk_read=0.0)),  # read from memory
        evidence(phases=SLOW, surroundings=SPINNING, stages=READS),  # nor was the disk seen to be read
        evidence(phases=SLOW, surroundings=SSD, use=use(waiting=0.01, disk_read=5e8)),
        evidence(phases=SLOW, surroundings=None, use=THRASHING),
    ],
    ids=["no wait", "decoding", "cached", "unseen", "a quick disk", "unknown"],
)
def test_a_disk_that_nobody_waits_for_is_well(made: Evidence) -> None:
    """Silent."""
    assert not [*SlowDisk.findings(made)]


def remote(used: int, fetched: int) -> Event:
    """Files read by s3fs."""
    detail = f"s3: blocks of 5242880 bytes, {used} of {fetched} used"
    return Event("remote_open", "/home/me/data.py:9", 40, detail=detail)


def test_reading_ahead_far_beyond_what_is_used_is_named() -> None:
    """200 MiB fetched for 4; it is waited for."""
    made = evidence(phases=SLOW, stages=READS, events=(remote(4 << 20, 200 << 20),))
    finding = only(RemoteReadAhead.findings(made), "remote_read_ahead")
    assert "200 MiB were fetched in blocks of 5.0 MiB" in finding.what
    assert (finding.file, finding.line) == ("/home/me/data.py", 9)
    assert finding.worth == pytest.approx(2 / 3, rel=0.03)


def test_reading_what_is_used_is_well() -> None:
    """Nearly all of it, or little altogether."""
    assert not [*RemoteReadAhead.findings(evidence(events=(remote(150 << 20, 200 << 20),)))]
    assert not [*RemoteReadAhead.findings(evidence(events=(remote(1000, 2 << 20),)))]
    assert not [*RemoteReadAhead.findings(evidence(events=(Event("remote_open", "", 1, detail="?"),)))]


def test_a_dev_shm_too_small_for_the_workers_batches_is_named() -> None:
    """2 workers x 2 batches of 20 MiB in 64 MiB, Docker's default."""
    small = {"shm_bytes": 64 << 20}
    made = evidence(loader={"batch_bytes": 20 << 20}, machine=small)
    finding = only(SmallShm.findings(made), "small_shm")
    assert finding.severity is Severity.MEDIUM
    assert "4 batches of 20.0 MiB" in finding.what
    assert "--shm-size" in finding.fix
    died = evidence(machine=small, error="RuntimeError: DataLoader worker is killed by signal: Bus error.")
    assert only(SmallShm.findings(died), "small_shm").severity is Severity.HIGH


def test_enough_shm_is_well() -> None:
    """4 MiB in 8 GiB; or no workers, which need none."""
    assert not [*SmallShm.findings(evidence())]
    assert not [
        *SmallShm.findings(evidence(loader={"num_workers": 0, "batch_bytes": 1 << 30}, machine={"shm_bytes": 1}))
    ]


# -- garbage_collected, blocking_checkpoint, blocking_log -------------------------------------------------


def test_collecting_garbage_in_each_step_is_named() -> None:
    """2 of 10 ms; once an epoch is well."""
    finding = only(GarbageCollected.findings(evidence(events=(event("gc_collect", 0.4),))), "garbage_collected")
    assert finding.worth == pytest.approx(0.2)
    assert finding.how_known is HowKnown.MEASURED
    assert not [*GarbageCollected.findings(evidence(events=(event("gc_collect", 0.015, count=2),)))]


def test_checkpoints_the_loop_stands_still_for_are_named() -> None:
    """20 saves of 50 ms in 200 steps of 10 ms: a third of the time; by the events or by the phase."""
    saves = event("save", 1.0, count=20, line=50)
    finding = only(BlockingCheckpoint.findings(evidence(events=(saves,))), "blocking_checkpoint")
    assert finding.worth == pytest.approx(1 / 3)
    assert (finding.line, finding.how_known) == (50, HowKnown.MEASURED)
    by_phase = evidence(phases={"checkpoint": 0.005})
    assert only(BlockingCheckpoint.findings(by_phase), "blocking_checkpoint").worth == pytest.approx(1 / 3)


def test_a_save_now_and_then_is_well() -> None:
    """One of 10 ms in 200 steps."""
    assert not [*BlockingCheckpoint.findings(evidence(events=(event("save", 0.01, count=1),)))]
    assert not [*BlockingCheckpoint.findings(evidence())]


def test_logs_the_step_waits_for_are_named() -> None:
    """1 of 10 ms; a line each 100 steps is well."""
    finding = only(
        BlockingLog.findings(evidence(events=(event("log", 0.2, detail="SummaryWriter.add_scalar"),))), "blocking_log"
    )
    assert finding.worth == pytest.approx(0.1)
    assert "SummaryWriter.add_scalar" in finding.what
    assert not [*BlockingLog.findings(evidence(events=(event("log", 0.002, count=2),)))]


# -- threads ----------------------------------------------------------------------------------------------

FULL = use(cpu=3.9, workers=0.0)


def test_more_threads_than_cores_are_named() -> None:
    """Two processes of four threads on four cores: two each."""
    around = ProcessEnvironment(omp_threads=4, threads=4, processes=2)
    finding = ThreadsOversubscribed.run(evidence(surroundings=around, use=FULL))
    assert finding is not None
    assert (finding.name, finding.technique, finding.setting) == ("threads_oversubscribed", "cpu_threads", "2")
    assert "8 threads compute in 2 processes on 4 cores" in finding.what
    assert "OMP_NUM_THREADS=2" in finding.fix
    assert finding.severity is Severity.MEDIUM


@pytest.mark.parametrize(("omp", "by_script"), [(None, True), (4, True), (8, False)])
def test_threads_that_the_script_asks_for_itself_are_not_set_by_the_environment(
    omp: int | None, by_script: bool
) -> None:
    """torch takes no more threads than there are cores by itself."""
    finding = ThreadsOversubscribed.run(evidence(surroundings=ProcessEnvironment(omp_threads=omp, threads=8), use=FULL))
    assert finding is not None
    assert ("make that torch.set_num_threads(4)" in finding.fix) == by_script
    assert ("set OMP_NUM_THREADS=4" in finding.fix) != by_script


def test_threads_beside_busy_workers_are_named() -> None:
    """Four threads, and workers that keep three of the four cores busy."""
    finding = ThreadsOversubscribed.run(evidence(use=use(cpu=4.0, workers=3.0)))
    assert finding is not None
    assert "loader workers that keep 3.0 busy" in finding.what
    assert finding.setting == "1"


@pytest.mark.parametrize(
    "made",
    [
        evidence(use=FULL),  # four threads on four cores
        evidence(surroundings=ProcessEnvironment(threads=64), use=use(cpu=1.0)),  # they hardly compute
        evidence(surroundings=ProcessEnvironment(threads=64)),  # nobody looked
        evidence(on_gpu=True, surroundings=ProcessEnvironment(threads=64), use=use(cpu=16.0)),
        evidence(use=use(cpu=3.9, workers=1.0)),  # a worker beside them is as usual
        evidence(surroundings=None, use=FULL),
    ],
)
def test_threads_that_have_their_cores_are_well(made: Evidence) -> None:
    """Silent."""
    assert ThreadsOversubscribed.run(made) is None
