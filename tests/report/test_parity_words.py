"""What parity could have seen, in words: of each loss by itself."""

from __future__ import annotations

from dataclasses import replace

from hasten.report import parity_words


def test_how_small_a_change_would_have_shown_is_told_of_each_loss(make):
    """0.85 % of the training's loss, 1.45 % of validation's."""
    said = parity_words.parity(make()).detail
    assert said == (
        "training loss and validation loss alike; a change above 0.85 % (training loss) or 1.5 % (validation loss) "
        "would have been seen"
    )
    spots = " ".join(parity_words.blind_spots(make()))
    assert "A change of the training loss by less than 0.85 % can pass unseen." in spots
    assert "A change of the validation loss by less than 1.5 % can pass unseen." in spots


def test_what_was_equal_in_every_pair_is_called_equal(make):
    """The number of batches in a pass: that no change of 0 % was seen says nothing."""
    proof = make()
    loss, *_ = proof.parity.checks
    batches = replace(loss, what="batches a pass", baseline=(20.0, 20.0), plan=(20.0, 20.0), change=0.0, detectable=0.0)
    proof = replace(proof, parity=replace(proof.parity, checks=(loss, batches)))
    assert parity_words.check(batches) == "batches a pass: equal in 2 pairs"
    said = parity_words.parity(proof).detail
    assert said == "training loss and batches a pass alike; a change above 0.85 % (training loss) would have been seen"
    assert "batches a pass by less" not in " ".join(parity_words.blind_spots(proof))
