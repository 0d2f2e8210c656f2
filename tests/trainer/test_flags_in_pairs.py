"""Flags of the Trainer in pairs: none keeps a training that stops in the middle from going on to the bit."""

from __future__ import annotations

from dataclasses import fields

import pytest

from benchmarks.exact import flag_rows
from hasten.trainer.config import Config


@pytest.mark.timeout(900)  # 25 trainings; which they are takes seconds to find, so not when tests are collected
def test_a_training_goes_on_to_the_bit_under_every_pair_of_flags() -> None:
    found = {row.training: row.compare() for row in flag_rows.rows()}
    assert all(row["steps"] for row in found.values())
    assert {training: row["off"] for training, row in found.items() if not row["ok"]} == {}


def test_each_flag_is_in_a_row_or_has_its_reason() -> None:
    flags = {flag.name for flag in fields(Config)}
    assert flag_rows.VALUES.keys() | flag_rows.IN_NO_ROW.keys() == flags
    assert not flag_rows.VALUES.keys() & flag_rows.IN_NO_ROW.keys()
