"""The file system and disk that a folder lies on (Linux)."""

from __future__ import annotations

import os
import re
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
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        device = folder.stat().st_dev
    except OSError:
        return "", None
    best, kind, number = "", "", ""
    for line in lines:
        # 36 35 98:0 /root /mount/point options ... - type source options
        fields, _, rest = line.partition(" - ")
        parts = fields.split()
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), parts[4])
        inside = point == "/" or str(folder) == point or str(folder).startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind, number = point, rest.split()[0], parts[2]
    if number != f"{os.major(device)}:{os.minor(device)}" and os.major(device):
        number = f"{os.major(device)}:{os.minor(device)}"  # subvolumes (btrfs) have numbers of their own
    return kind, _spins(number)


def _spins(number: str) -> bool | None:
    """Whether a block device ("8:1") is a spinning disk; a partition is asked by its disk."""
    device = Path("/sys/dev/block") / number
    for place in (device / "queue", device.resolve().parent / "queue"):
        try:
            return (place / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None
