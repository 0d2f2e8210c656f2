"""Pages for contributors name files, folders and make targets that exist; the version is the one installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hasten
from benchmarks.exact.rows import ELSEWHERE, FOR_MEMORY, ON_FILES, SETTINGS, TRAJECTORY
from hasten.doctor.findings import FINDINGS
from hasten.techniques import CATALOGUE

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/index.md", "SECURITY.md", "README.md", "examples/README.md")
TOP = ("src/", "tests/", "docs/", "benchmarks/", "examples/", ".github/")


@pytest.mark.parametrize("page", PAGES)
def test_files_and_targets_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {path for path in re.findall(r"[\w./-]+", text) if path.startswith(TOP) and "<" not in path}
    linked = {str((ROOT / page).parent / path) for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", text)}
    placeholder = re.compile(r"(test_$|healthy/$|ill/$|techniques/$|benchmarks/$|benchmarks/doctor/ill/$)")
    missing = [
        path for path in named | linked if not placeholder.search(path) and not (ROOT / path.rstrip(".")).exists()
    ]
    assert missing == []
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)|^make ([a-z]+)", text, flags=re.MULTILINE)) <= {
        pair for name in targets for pair in ((name, ""), ("", name))
    }


def test_the_map_has_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {path.name + "/" * path.is_dir() for path in (ROOT / "src/hasten").iterdir() if path.name[0] not in "_."}
    assert {room for room in rooms if f"`{room}`" not in page} == {"py.typed"}


def test_the_version_is_what_was_installed() -> None:
    assert hasten.__version__ == version("hasten")
    # Without an installed package (a checkout on PYTHONPATH) there is one as well.
    bare = "import sys; sys.path.insert(0, sys.argv[1]); import hasten; print(hasten.__version__)"
    source = str(ROOT / "src")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", bare, source], capture_output=True, text=True, check=True)
    assert done.stdout == "0+unknown\n"


def test_each_technique_is_held_to_its_word_or_it_is_said_where_and_the_findings_are_counted() -> None:
    """As CONTRIBUTING.md asks of who adds one."""
    assert sorted([*SETTINGS, *ON_FILES, *FOR_MEMORY, *ELSEWHERE, *TRAJECTORY]) == sorted(CATALOGUE)
    assert f"{len(FINDINGS)} findings, each with its place" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["tune.html", "doctor.html"])
def test_published_reports_name_no_folder_of_the_machine(page: str) -> None:
    text = (ROOT / "docs/reports" / page).read_text(encoding="utf-8")
    assert not re.search(r"[\"'> ](/(tmp|root|home|work|Users)/)", text)
