"""Run a command that the kernel kills when its parent dies (Linux). Run by path: it imports nothing of hasten.

python -I -S follow.py PARENT_PID COMMAND...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, for any reason; the setting survives exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request above: nothing would kill this process
        os._exit(1)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
