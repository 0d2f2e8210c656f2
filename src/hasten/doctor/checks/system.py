"""The machine around the training: disks, shared memory, the collector of garbage, files written while it waits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Event, Evidence, Finding, HowKnown, Phase, Severity, severity_of, split_place
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, faster_loading, in_ms, mean_during, per_step, stages_of
from hasten.evidence.weigh import LEAST, seconds_of, share_of, steady_seconds, timed

_NETWORK = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "s3", "virtiofs")
_READING = 1e6  # bytes a second from which a disk counts as being read
_BLOCKED = 0.3  # of one core's time waited for disks


class SlowDisk(Check):
    """A spinning disk, or one behind a network, that the training waits for.

    Rests on the wait for batches, the measured share of reading in them (else the CPU's wait for disks), and what the
    data lies on (Lin: move the active data to an SSD).
    """

    name = "slow_disk"
    sources = ("Lin, move the active data to the SSD",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        loader, around, use = evidence.train_loader, evidence.surroundings, evidence.use
        if loader is None or around is None or data_share(evidence) < 0.1:
            return
        stages = stages_of(evidence, loader)
        waiting = (mean_during(evidence, use.waiting) or 0.0) if use is not None else 0.0
        blocked = min(1.0, waiting * evidence.machine.cores)
        reading = (mean_during(evidence, use.disk_read) or 0.0) if use is not None else 0.0
        share = stages.read / stages.seconds if stages is not None else blocked
        network = around.filesystem.startswith(_NETWORK)
        # From memory even a slow disk's files are read at once: the wait must have been seen.
        seen = share >= _BLOCKED if network else blocked >= _BLOCKED and reading >= _READING
        if not seen or not (network or around.rotational or blocked >= 0.5):
            return
        kind = (
            f"a network file system ({around.filesystem})"
            if network
            else "a spinning disk"
            if around.rotational
            else "a disk that cannot keep up"
        )
        read = f", read at {reading / 1e6:.0f} MB/s" if reading >= _READING else ""
        finding = timed(
            cls.name,
            f"the data lies on {kind}{read}: {percent(share)} of a batch's time is spent reading, and the step waits "
            f"{percent(data_share(evidence))} of its time for batches",
            f"copy {around.data_folder or 'the data'} to a local SSD before the training, or pack it into few "
            "large files "
            "that are read in order",
            faster_loading(evidence, loader, share),
            HowKnown.ESTIMATED,
            place=loader.where,
            where=around.data_folder,
            details=("at the most: as if reading took no time",),
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


class RemoteReadAhead(Check):
    """Files on a remote store of which far more is fetched than used: gcsfs and s3fs read ahead by megabytes.

    Rests on the bytes that were asked for and those that were used; the worth is that share of the reading.
    """

    name = "remote_read_ahead"
    sources = ("fsspec, caching and block sizes",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line that reads."""
        loader = evidence.train_loader
        stages = stages_of(evidence, loader) if loader is not None else None
        for event in evidence.events_of("remote_open"):
            used, fetched, block = _read(event)
            if fetched < 4 * used or fetched - used < 4 << 20:
                continue
            waste = 1 - used / fetched
            share = stages.read / stages.seconds if stages is not None else 0.0
            worth = faster_loading(evidence, loader, share * waste) if loader is not None else 0.0
            file, line = split_place(event.where)
            blocks = f" in blocks of {block / 2**20:.1f} MiB" if block else ""
            yield Finding(
                cls.name,
                f"{fetched / 2**20:.0f} MiB were fetched{blocks} from a remote store, of which "
                f"{used / 2**20:.2g} MiB were "
                f"used, over {event.count} files",
                "open the files with `block_size=` near what is read at a time, or cache_type='none' (or 'first') for "
                "reads here and there",
                severity_of(worth),
                worth if worth >= LEAST else None,
                HowKnown.ESTIMATED,
                file,
                line,
                sources=cls.sources,
            )


def _read(event: Event) -> tuple[int, int, int]:
    """Bytes used, bytes fetched and the block size: "s3: blocks of 5242880 bytes, 100 of 5242880 used"."""
    amounts = re.search(r"(\d+) of (\d+) used", event.detail)
    block = re.search(r"blocks of (\d+)", event.detail)
    return (int(amounts[1]), int(amounts[2]), int(block[1]) if block else 0) if amounts else (0, 0, 0)


class SmallShm(Check):
    """A /dev/shm too small for the batches that workers hold ready in it.

    Rests on the batches' size and the capacity, or on how full it was seen (PyTorch: `--ipc=host` or `--shm-size`).
    """

    name = "small_shm"
    sources = ("PyTorch README, Docker image, --shm-size",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        capacity = evidence.machine.shm_bytes
        used = [loader for loader in evidence.loaders if loader.num_workers and loader.role != "unused"]
        if not capacity or not used:
            return
        # Another loader's workers are at rest, or gone, while one is read.
        worst = max(used, key=_held)
        held, seen = _held(worst), max((*evidence.use.shm, 0)) if evidence.use is not None else 0
        died = "bus error" in evidence.error.lower() or "shared memory" in evidence.error.lower()
        if held < 0.8 * capacity and seen < 0.9 * capacity and not died:
            return
        file, line = split_place(worst.where)
        ready = worst.num_workers * (worst.prefetch_factor or 2)
        peak = f"; it was {percent(min(1.0, seen / capacity))} full" if seen else ""
        yield Finding(
            cls.name,
            f"{worst.num_workers} workers hold up to {ready} batches of {worst.batch_bytes / 2**20:.1f} MiB ready, "
            f"{held / 2**20:.0f} MiB, in a /dev/shm of {capacity / 2**20:.0f} MiB{peak}",
            f"enlarge it (docker run --shm-size={max(1, round(2 * held / 2**30))}g, or --ipc=host), or set "
            "prefetch_factor=1",
            Severity.HIGH if died else Severity.MEDIUM,
            file=file,
            line=line,
            details=(f"the training ended with: {evidence.error}",) if died else (),
            sources=cls.sources,
        )


def _held(loader: object) -> int:
    """Bytes of the batches that a loader's workers hold ready."""
    workers, depth, size = (getattr(loader, name) or 0 for name in ("num_workers", "prefetch_factor", "batch_bytes"))
    return int(workers * (depth or 2) * size)


class GarbageCollected(Check):
    """`gc.collect()` in the loop.

    Rests on the measured time of the calls; tensors are freed without it as soon as nothing refers to them.
    """

    name = "garbage_collected"
    sources = ("Python, gc",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        for event in evidence.events_of("gc_collect"):
            spent = per_step(evidence, [event])
            finding = timed(
                cls.name,
                f"gc.collect() {event.count} times in {evidence.steps} steps, {in_ms(spent)} a step",
                "take it out, or call it once an epoch",
                share_of(evidence, spent),
                HowKnown.MEASURED,
                place=event.where,
                sources=cls.sources,
            )
            if finding is not None:
                yield finding


class BlockingCheckpoint(Check):
    """Checkpoints that the training stands still for.

    Rests on the measured time of the saves, within steps and between them, against all steps (PyTorch, asynchronous
    distributed checkpoints).
    """

    name = "blocking_checkpoint"
    sources = ("PyTorch, torch.distributed.checkpoint.async_save",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        events = evidence.events_of("save")
        saving = max(per_step(evidence, events), seconds_of(evidence, Phase.CHECKPOINT))
        step = steady_seconds(evidence)
        if not step or not saving:
            return
        count = sum(event.count for event in events)
        often = f", {count} times in {evidence.steps} steps" if count else ""
        finding = timed(
            cls.name,
            f"the training stands still while checkpoints are written{often}: {in_ms(saving)} for each step of "
            f"{in_ms(step)}",
            "save less often, or beside the training (torch.distributed.checkpoint.async_save; hasten's "
            "Trainer does so)",
            saving / (step + saving),
            HowKnown.MEASURED,
            place=events[0].where if events else "",
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


class BlockingLog(Check):
    """Logs and files that are written while the step waits.

    Rests on the measured time of these writes.
    """

    name = "blocking_log"
    sources = ("Falcon", "TraceML")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        for event in evidence.events_of("log"):
            spent = per_step(evidence, [event])
            by = f" by {event.detail}" if event.detail else ""
            finding = timed(
                cls.name,
                f"a log is written{by} {event.count} times in {evidence.steps} steps, {in_ms(spent)} a step",
                "write every 50 to 100 steps, without flushing, or from a thread",
                share_of(evidence, spent),
                HowKnown.MEASURED,
                place=event.where,
                sources=cls.sources,
            )
            if finding is not None:
                yield finding


CHECKS = (SlowDisk, RemoteReadAhead, SmallShm, GarbageCollected, BlockingCheckpoint, BlockingLog)
