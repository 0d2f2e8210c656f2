"""Where a process is that does not answer, asked of py-spy where that is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from hasten.evidence.libraries import is_library

_FRAME = re.compile(r"^\s+\S.* \((?P<file>[^()]+):(?P<line>\d+)\)$")


def where_is(pid: int) -> str:
    """`file:line` of the script at which a Python process is, past libraries; "" where that cannot be told."""
    spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    try:
        said = subprocess.run(
            [spy, "dump", "--full-filenames", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    main = said.partition('"MainThread"')[2].split("\nThread ")[0]
    found = [match for line in main.splitlines() if (match := _FRAME.match(line))]
    own = [match for match in found if not (match["file"].startswith("<") or is_library(match["file"]))]
    return f"{own[0]['file']}:{own[0]['line']}" if own else ""
