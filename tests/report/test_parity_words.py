"""What parity could have seen, in words: of each loss by itself."""

from __future__ import annotations

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
