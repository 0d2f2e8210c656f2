"""What the page says of a machine that others used meanwhile."""

from __future__ import annotations

import dataclasses

from hasten.report import verdict
from hasten.report.html import render
from hasten.tuner.proof import Answer, MachineNoise, Pair, Ratio
from tests.report.test_html import Page


def test_a_claim_that_others_disturbed_is_called_so_and_not_proven(make):
    """A busy process beside two threads: a ratio that is true only while it runs."""
    proof = make(disturbed=0.45, pairs=(Pair(0, 0.05, 0.02, 0.5),), speedup=Ratio(9.87, 8.0, 11.0))
    assert proof.proven is Answer.NOT_KNOWN
    found = verdict.verdict(proof)
    assert found.title == "9.87x while others took 45 % of the CPU: not proven"
    assert "A quiet machine may not bear it out" in found.detail
    assert "Tune again when nothing else runs." in found.detail
    text = Page(render(proof)).text
    assert "the claim is of blocks that this disturbed, and not proven" in text
    assert "measured while others took 45 % of the CPU" in text
    assert "interval 2.03x to 2.21x while others took 50 % of the CPU" in text  # of whole epochs, from fresh processes
    assert "faster, proven" not in text


def test_nothing_that_helped_beside_others_may_help_all_the_same(nothing):
    blocks = tuple(dataclasses.replace(one, taken=0.45, disturbed=True) for one in nothing().blocks)
    assert "tune again when nothing else runs" in verdict.verdict(nothing(blocks=blocks)).detail
    assert "tune again" not in verdict.verdict(nothing()).detail
    assert verdict.noisy(nothing()).endswith("on a quiet machine what was tried may do otherwise.")


def test_blocks_that_were_left_out_are_said(make):
    blocks = tuple(dataclasses.replace(one, taken=0.45, disturbed=n < 5) for n, one in enumerate(make().blocks))
    text = Page(render(make(blocks=blocks))).text
    assert "2.31x faster, proven" in text
    assert "They disturbed 5 of 38 blocks" in text
    assert "the claim is of blocks that nobody disturbed" in text
    assert text.count("disturbed: others took 45 % of the CPU") == 5


def test_a_quiet_machine_is_said_to_be_quiet(make):
    text = Page(render(make(noise=MachineNoise(0.0, 0.004, 0.01)))).text
    assert "Noisy machine" not in text
    assert "Other processes kept 0.0 of 2 cores busy." in text
    assert "the machine was quiet" in text


def test_noise_that_was_not_seen_is_not_called_quiet(make):
    text = Page(render(make(noise=MachineNoise(None, None, 0.05)))).text
    assert "What other processes did could not be seen." in text
    assert "quiet" not in text
