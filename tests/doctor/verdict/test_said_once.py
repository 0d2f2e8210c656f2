"""What was once written in two places, which had drifted apart: each place let something through that the other saw."""

from __future__ import annotations

import dataclasses

import pytest

from hasten.doctor.diagnose import diagnose
from hasten.doctor.findings.slow_disk import SlowDisk
from hasten.evidence import Evidence, Finding, ProcessEnvironment, Sampled, Severity, Stages
from hasten.evidence.disks import is_network
from hasten.evidence.finding import worst_first
from hasten.evidence.weigh import on_gpu
from tests.doctor.findings.made import event, evidence, use
from tests.doctor.made import GPU_MACHINE, model, run

IDLE = Sampled(steps=(20,), device_busy=0.3, launches=900.0)


def trained(device: str) -> Evidence:
    return run(machine=GPU_MACHINE, models=(model(device),), sampled=IDLE)


def test_a_teacher_on_the_gpu_does_not_make_a_training_on_the_cpu_one_on_the_gpu() -> None:
    """Checks took it for one, the verdict did not."""
    teacher = dataclasses.replace(model("cuda"), train_calls=0)
    seen = run(machine=GPU_MACHINE, models=(model("cpu"), teacher), sampled=IDLE)
    assert not on_gpu(seen)
    assert diagnose(seen).verdict.resource not in ("gpu", "sync")


def test_a_model_trained_in_eval_mode_trains_on_the_gpu() -> None:
    """The verdict saw a training on the CPU, checks did not."""
    tuned = dataclasses.replace(model("cuda"), train_calls=0, backward_through_eval=True)
    seen = run(machine=GPU_MACHINE, models=(tuned,), sampled=IDLE)
    assert on_gpu(seen)
    assert diagnose(seen).verdict.resource == "sync"


@pytest.mark.parametrize("filesystem", ["nfs4", "glusterfs", "virtiofs", "s3fs", "fuse.sshfs"])
def test_a_disk_behind_a_network_is_one_for_finding_and_verdict(filesystem: str) -> None:
    """The verdict called three of these a disk."""
    reading = Stages(loader=0, batches=4, read=0.09, decode=0.01)
    around = ProcessEnvironment(data_folder="/mnt/data", filesystem=filesystem)
    waits = run(shares={"data": 0.7, "forward": 0.3}, stages=(reading,), surroundings=around)
    assert diagnose(waits).verdict.resource == "network"


def test_a_local_disk_that_a_program_reads_is_not_behind_a_network() -> None:
    """Both took NTFS and exFAT for a network."""
    assert not is_network("fuseblk")
    slow = evidence(phases={"data": 0.01}, surroundings=ProcessEnvironment(filesystem="fuseblk"), use=use(cpu=1.0))
    assert not SlowDisk.findings(slow)


@pytest.mark.parametrize("kind", ["moved", "blocking_copy", "item"])
def test_whatever_waits_for_the_gpu_holds_it_up(kind: str) -> None:
    """The verdict did not count copies, and called such a run launch-bound."""
    waits = event(kind, 0.6, count=200, line=42, device="cuda")
    seen = dataclasses.replace(trained("cuda"), events=(waits,))
    assert "held up by host syncs" in diagnose(seen).verdict.title
    assert ":42" in diagnose(seen).verdict.details[0]


def test_findings_come_in_one_order_whoever_lists_them() -> None:
    found = [Finding(name, "", "", severity) for severity in reversed(Severity) for name in ("b", "a")]
    assert [(one.severity, one.name) for one in worst_first(found)] == [
        (severity, name) for severity in Severity for name in ("a", "b")
    ]
