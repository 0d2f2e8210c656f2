"""What data lies on."""

from __future__ import annotations

_NETWORK = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "s3", "virtiofs")
_LOCAL = ("fuseblk", "fusectl")  # a local NTFS or exFAT disk, which a program of its own reads


def is_network(filesystem: str) -> bool:
    """Whether a file system's name ("nfs4", "fuse.sshfs") is that of one behind a network."""
    return filesystem.startswith(_NETWORK) and not filesystem.startswith(_LOCAL)
