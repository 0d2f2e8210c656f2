"""Counts which attributes of Lightning's Trainer the fetched repositories use.

python benchmarks/lightning_modules/usage.py /work/public/modules

It reads every Python file that mentions Lightning, and counts `trainer.NAME` and `anything.trainer.NAME`: uses, and
repositories that use it. What a repository does with a trainer of another kind in such a file is counted too.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path


def names(source: str) -> list[str]:
    """The attributes asked of `trainer` or `x.trainer` in a source text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == "trainer":
                found.append(node.attr)
            if isinstance(owner, ast.Attribute) and owner.attr == "trainer":
                found.append(node.attr)
    return found


def main() -> None:
    """Prints a markdown table: attribute, repositories, uses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, help="a folder of repositories")
    uses: Counter[str] = Counter()
    repositories: Counter[str] = Counter()
    folders = [folder for folder in sorted(parser.parse_args().root.iterdir()) if not folder.name.startswith(".")]
    for folder in folders:
        here: Counter[str] = Counter()
        for path in folder.rglob("*.py"):
            text = path.read_text(errors="replace")
            if "lightning" in text:
                try:
                    here.update(names(text))
                except SyntaxError:
                    print(f"not Python 3: {path}")
        uses.update(here)
        repositories.update(here.keys())
    print(f"{len(folders)} repositories\n\n| attribute | repositories | uses |\n| --- | --- | --- |")
    for name, count in sorted(repositories.items(), key=lambda pair: (-pair[1], -uses[pair[0]])):
        print(f"| {name} | {count} | {uses[name]} |")


if __name__ == "__main__":
    main()
