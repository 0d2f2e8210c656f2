"""Fetches the repositories of `modules.toml`, each at its commit, into a folder.

    python benchmarks/lightning_modules/prepare.py /work/public/modules [--only NAME]

Each becomes ROOT/NAME, holding the paths named in `modules.toml` and nothing of git. It is taken from the stored
copy under --mirror (a bare repository `owner+name/repo`) where there is one, else with

    git clone --filter=blob:none --no-checkout https://github.com/OWNER/NAME

Packages these need beside Lightning and torchvision stand under `needs`; `--needs` prints them for pip.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = {".py", ".txt", ".json", ".yaml", ".yml", ".toml", ".csv"}


def unpack(repository: Path, entry: dict[str, Any], target: Path) -> None:
    """Writes the named paths of the named commit into `target`: Python files and small text only."""
    listed = ["git", "-C", str(repository), "ls-tree", "-r", "--name-only", entry["commit"]]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    wanted = [path if "*" in path else f"{path}/*" for path in entry["paths"]]
    files = [name for name in names if Path(name).suffix in KINDS and any(fnmatch(name, pattern) for pattern in wanted)]
    target.mkdir(parents=True, exist_ok=True)
    command = ["git", "-C", str(repository), "archive", entry["commit"], "--"]
    archive = subprocess.run([*command, *files], check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(target)], input=archive, check=True)


def fetch(entry: dict[str, Any], root: Path, mirror: Path) -> str:
    """Brings one repository to ROOT/NAME, unless that commit is there. Says what was done."""
    target, mark = root / entry["name"], root / entry["name"] / ".commit"
    if mark.is_file() and mark.read_text() == entry["commit"]:
        return "there already"
    stored = mirror / entry["repo"].replace("/", "+") / "repo"
    if stored.is_dir():
        unpack(stored, entry, target)
    else:
        with tempfile.TemporaryDirectory() as folder:
            address = f"https://github.com/{entry['repo']}"
            subprocess.run(["git", "clone", "--filter=blob:none", "--no-checkout", address, folder], check=True)
            unpack(Path(folder), entry, target)
    mark.write_text(entry["commit"])
    return "fetched"


def main() -> None:
    """Fetches all repositories, or one; or prints the packages they need."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, nargs="?", default=Path("/work/public/modules"))
    parser.add_argument("--only", metavar="NAME")
    parser.add_argument("--mirror", type=Path, default=Path("/work/.mirror"))
    parser.add_argument("--needs", action="store_true", help="print the packages they need, and fetch nothing")
    given = parser.parse_args()
    entries = tomllib.loads((HERE / "modules.toml").read_text())["module"]
    if given.needs:
        print(*sorted({package for entry in entries for package in entry["needs"]}))
        return
    for entry in entries:
        if given.only in (None, entry["name"]):
            print(f"{entry['name']}: {fetch(entry, given.root, given.mirror)}")


if __name__ == "__main__":
    main()
