"""How busy a machine is with what is not ours: figures measured beside it are lower than they would be."""

from __future__ import annotations

import time

import psutil


class Others:
    """What the machine's other processes take of it, between the first mark and the last."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float, float]] = []  # when, CPU seconds of the machine, and of the script's own

    def mark(self, pid: int) -> None:
        """Note what has been used by now, by all and by this process and its children."""
        try:
            family = [root := psutil.Process(pid), *root.children(recursive=True)]
            own = sum(sum(member.cpu_times()[:4]) for member in family)
        except psutil.Error:  # over, or a worker that ended just now
            return
        times = psutil.cpu_times()
        self._marks.append((time.monotonic(), sum(times) - times.idle - getattr(times, "iowait", 0.0), own))

    def cores(self) -> float:
        """Cores' worth of CPU; 0 where it was not watched for a second."""
        if len(self._marks) < 2 or self._marks[-1][0] - self._marks[0][0] < 1:
            return 0.0
        seconds, everyone, own = (last - first for first, last in zip(self._marks[0], self._marks[-1], strict=True))
        return max(0.0, (everyone - own) / seconds)
