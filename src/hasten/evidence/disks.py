"""Find out which file system and which kind of disk a folder is on (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_NETWORK = (
    "nfs", "cifs", "smb", "fuse", "9p", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "s3", "virtiofs",
)  # fmt: skip
_LOCAL = ("fuseblk", "fusectl")  # not network file systems: a local NTFS or exFAT disk, and FUSE's control files


def is_network(kind: str) -> bool:
    """Return whether a file system type ("nfs4", "fuse.sshfs") is a network file system."""
    return kind.startswith(_NETWORK) and not kind.startswith(_LOCAL)


def filesystem(folder: Path) -> tuple[str, bool | None]:
    """Return the type of a folder's file system and whether its disk spins; "" and None if unknown."""
    import psutil

    try:
        device = folder.stat().st_dev
        mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    except (OSError, psutil.Error):
        return "", None
    # Of several file systems mounted at the same place the last one is visible.
    kind = max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    return kind, _spins(f"{os.major(device)}:{os.minor(device)}")


def _spins(number: str) -> bool | None:
    """Return whether a block device ("8:1") is a spinning disk; None if unknown."""
    device = Path("/sys/dev/block") / number
    for queue in (device / "queue", device.resolve().parent / "queue"):  # a partition has no queue, but its disk has
        try:
            return (queue / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
