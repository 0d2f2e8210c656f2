"""Becomes a command that ends when its parent ends. Run by path, before anything else is imported; Linux.

python -I -S follow.py PARENT_PID COMMAND...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, whatever it dies of; survives exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before this process said so
        os._exit(1)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
