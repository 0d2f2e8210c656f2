"""With "both", whole samples are kept where nothing is drawn, and decoded files elsewhere."""

from __future__ import annotations

import pytest

from tests.techniques.conftest import Train, identical
from tests.techniques.test_sample_cache import IMAGES, NOT_LOOKED_OVER, compared

BOTH = f"""
    {NOT_LOOKED_OVER}
    from PIL import ImageOps
    ImageOps.mirror = counted(ImageOps.mirror)  # once for each sample of these that is made, as Image.open
    class Plain(Dataset):
        scale = 255
        def __init__(self): self.loader = pil_loader
        def __len__(self): return 12
        def __getitem__(self, index):
            x = np.asarray(ImageOps.mirror(self.loader(f"images/{{index:02}}.png"))).copy()
            return torch.from_numpy(x).permute(2, 0, 1) / self.scale, 0
    class Drawing(Plain):  # which no name in its code says: it is found out with its first sample
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.zeros(1).geometric_(0.5), y
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_both_keeps_samples_where_nothing_is_drawn_and_what_is_decoded_elsewhere(train: Train, workers: int) -> None:
    script = f"""{BOTH}
    augmented, plain = (DataLoader(data, 4, num_workers={workers}) for data in (Images("images"), Plain()))
    fit([augmented, plain, DataLoader(Drawing(), 4)])
    """
    plain, changed = compared(train, script, "both")
    assert plain == 3 * (12 + 24 + 24)
    # Two workers may make the same one.
    least = 12 + (12 + 12) + (12 + 36)
    assert least <= changed <= least + (12 + 24 if workers else 0)


def test_both_tells_of_samples_that_are_kept_no_more_and_of_no_others(train: Train) -> None:
    script = f"""{BOTH}
    data = Plain()
    loader = DataLoader(data, 4)
    for dataset in (data, Drawing(), Images("images")): list(DataLoader(dataset, 4))
    print("so far nothing", file=sys.stderr, flush=True)
    data.log = open("log", "w")
    list(loader)
    """
    before, after = train(IMAGES + script, sample_cache="both").err.split("so far nothing\n")
    assert before == ""
    assert after == (
        "hasten: sample_cache: what samples are made of holds a _io.TextIOWrapper (dataset.log); "
        "the dataset (Plain of 12 samples) has only decoded files kept from here on.\n"
    )


def test_a_loader_that_is_built_again_for_each_epoch_finds_what_was_decoded(train: Train) -> None:
    script = f"""{BOTH}
    data = Plain()
    for _ in range(3):
        fit([DataLoader(data, 4)], epochs=1)
    """
    _, changed = compared(train, script, "both")
    assert changed == 12 + 3 * 12  # whole samples go with their loader, as with "samples"


def test_a_sample_that_is_made_again_is_made_of_the_file_and_not_of_what_was_decoded(train: Train) -> None:
    script = f"""{BOTH}
    kept._AUDITED = 10**9
    fit([DataLoader(Plain(), 4)])
    """
    plain, changed = compared(train, script, "both")
    assert plain == 3 * (12 + 12)
    assert changed == plain


@pytest.mark.parametrize("plan", [{"loader_workers": 2}, {"read_ahead": 2}], ids=str)
def test_both_beside_other_techniques_of_loading_changes_no_bit(train: Train, plan: dict[str, int]) -> None:
    script = f"""{IMAGES}{BOTH}
    augmented = Images("images", augment={"read_ahead" in plan})  # workers draw other numbers
    datasets = (augmented, Plain(), Subset(Plain(), [3, 1, 2, 2, 5]))
    fit([DataLoader(data, 4, shuffle=True) for data in datasets], epochs=4)
    """
    plain, changed = train(script), train(script, **plan, sample_cache="both")
    assert plain.code == changed.code == 0, changed.err
    assert plain.left.pop("read") > changed.left.pop("read")
    assert identical(plain.left, changed.left)
