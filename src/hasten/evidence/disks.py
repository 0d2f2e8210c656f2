"""The file system and disk that a folder lies on (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_NETWORK = (
    "nfs", "cifs", "smb", "fuse", "9p", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "s3", "virtiofs",
)  # fmt: skip
_LOCAL = ("fuseblk", "fusectl")  # a local NTFS or exFAT disk, which a program of its own reads


def is_network(kind: str) -> bool:
    """Whether a file system of this name ("nfs4", "fuse.sshfs") lies behind a network."""
    return kind.startswith(_NETWORK) and not kind.startswith(_LOCAL)


def filesystem(folder: Path) -> tuple[str, bool | None]:
    """Return the type of a folder's file system, and whether its disk spins; ("", None) where that is not known."""
    import psutil

    try:
        device = folder.stat().st_dev
        around = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    except (OSError, psutil.Error):
        return "", None
    # Of several at one place the last lies on top.
    kind = max(reversed(around), key=lambda mount: len(mount.mountpoint)).fstype if around else ""
    return kind, _spins(f"{os.major(device)}:{os.minor(device)}")


def _spins(number: str) -> bool | None:
    """Whether a block device ("8:1") is a spinning disk; a partition is asked by its disk."""
    device = Path("/sys/dev/block") / number
    for place in (device / "queue", device.resolve().parent / "queue"):
        try:
            return (place / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
