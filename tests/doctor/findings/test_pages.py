"""The page of every finding: its sections are there, its example shows the finding, what to write instead does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hasten.doctor.findings import FINDINGS, IN_CODE
from hasten.doctor.lint.check import LintResult
from hasten.doctor.lint.formats import as_sarif
from hasten.doctor.rule import SECTIONS
from tests.doctor.lint.scripts import found

HEAD = """\
import contextlib
import gc
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from config import Config

class Images(Dataset):
    def __getitem__(self, index):
        return read(index)

"""


def example(name: str, section: str) -> str:
    """The code of a section, "" where it is a shell's."""
    block = re.fullmatch(r"```(\w+)\n(.*)\n```", FINDINGS[name].section(section), re.DOTALL)
    assert block, f"{name}: {section} is no code block"
    return block[2] if block[1] == "python" else ""


@pytest.mark.parametrize("name", FINDINGS)
def test_a_page_has_all_sections_in_order_and_its_code_is_python(name: str) -> None:
    rule = FINDINGS[name]
    titles = re.findall(r"^## (.+)$", rule.page(), re.MULTILINE)
    assert titles == [title for title in SECTIONS if title in titles]
    assert set(SECTIONS) - set(titles) <= {"How it is known"}
    assert rule.summary().endswith(".")
    assert rule.sources
    for section in ("Example", "Use instead"):
        compile(example(name, section), name, "exec")


@pytest.mark.parametrize("name", IN_CODE)
def test_the_example_shows_the_finding_and_what_to_write_instead_does_not(tmp_path: Path, name: str) -> None:
    ill, well = (HEAD + example(name, section) + "\n" for section in ("Example", "Use instead"))
    assert found(tmp_path, ill, name)
    assert not found(tmp_path, well, name)


def test_sarif_has_every_page_as_its_help() -> None:
    rules = as_sarif(LintResult((), (), 0), "1.0")["runs"][0]["tool"]["driver"]["rules"]
    helps = {rule["id"]: rule["help"]["markdown"] for rule in rules if rule["id"] in FINDINGS}
    assert helps == {name: FINDINGS[name].page() for name in IN_CODE}
