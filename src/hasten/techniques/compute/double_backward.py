"""Find requests for double backward in a script's source, before a model is compiled."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from pathlib import Path

from hasten.evidence.libraries import is_library


def differentiates_again(home: str) -> str:
    """Return where the script's own code, or the module named `home`, requests `create_graph`; "" if nowhere.

    torch refuses a double backward of compiled code only when it happens, long after the forward; so it is looked for
    in source, before anything is compiled. Installed libraries are not read.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or name.startswith("torch.") or name.partition(".")[0] == "hasten":
            continue
        if (is_library(file) or is_library(os.path.realpath(file))) and name not in (home, "__main__"):
            continue
        if line := _line_of_create_graph(Path(file)):
            return f"{Path(file).name}:{line}"
    return ""


def _line_of_create_graph(file: Path) -> int:
    """Return the first line of a source file that gives `create_graph` another value than False, or 0."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # code that does not parse cannot be called either
        text = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)) if "create_graph" in text else ():
            if isinstance(node, ast.keyword) and node.arg == "create_graph":
                if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                    return node.lineno
    return 0
