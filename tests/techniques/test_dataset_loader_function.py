"""What a script does with its dataset's `loader`, with Pillow and with other libraries reaches the samples."""

from __future__ import annotations

from typing import Any

import pytest

from tests.techniques.conftest import Train, identical
from tests.techniques.test_sample_cache import IMAGES, NOT_LOOKED_OVER, compared

# What a script does with the object that is its dataset's `loader`.
WITH_THE_LOADER = {
    "an attribute": "data.loader.size = 4 + epoch",
    "a method": "data.loader.set_size(4 + epoch)",
    "what it is": "it = data.loader; said.append([isinstance(it, Sized), it == sized, repr(it) == repr(sized), "
    "it.size, hash(it) == hash(sized), hasattr(it, 'other')])",
    "a new attribute, and none": "data.loader.other = epoch; said.append(sized.other); del data.loader.other",
    "an argument of a partial": "data.loader.keywords['size'] = 4 + epoch",
    "an attribute of a function": "data.loader.size = 4 + epoch",
}


@pytest.mark.parametrize(
    "plan", [{"sample_cache": "decoded"}, {"read_ahead": 2}, {"sample_cache": "decoded", "read_ahead": 2}]
)
@pytest.mark.parametrize("what", WITH_THE_LOADER)
def test_a_loader_function_is_to_the_script_what_it_was(train: Train, what: str, plan: dict[str, Any]) -> None:
    script = f"""
    import functools
    class Sized:
        size = 4
        def set_size(self, size): self.size = size
        def __call__(self, path): return pil_loader(path).resize((self.size, 6))
    def by_attribute(path): return pil_loader(path).resize((by_attribute.size, 6))
    by_attribute.size = 4
    sized = Sized()
    if "partial" in {what!r}: sized = functools.partial(lambda path, size: pil_loader(path).resize((size, 6)), size=4)
    if "function" in {what!r}: sized = by_attribute
    data = Images("images", loader=sized)
    said, seen = [], []
    for epoch in range(3):
        {WITH_THE_LOADER[what]}
        seen += [x.tolist() for x, _ in DataLoader(data, batch_size=5, shuffle=True)]
    torch.save({{"seen": seen, "said": said}}, "left.pt")
    """
    plain, changed = train(IMAGES + script), train(IMAGES + script, **plan)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left, changed.left)
    assert "dataset" in changed.installed.get("sample_cache", "dataset"), "it acts"


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize(
    "setting", ["ImageFile.LOAD_TRUNCATED_IMAGES = {on}", "Image.MAX_IMAGE_PIXELS = 10 if {on} else 10**8"]
)
def test_settings_of_pillow_that_change_are_noticed(train: Train, setting: str, where: str) -> None:
    """Between passes, and between two batches of one."""
    script = f"""
    import warnings
    from PIL import ImageFile
    warnings.simplefilter("error")
    whole = Path("images/03.png").read_bytes()
    Path("images/03.png").write_bytes(whole[:-40])
    time.sleep(0.03)
    class Caught(Images):
        def __getitem__(self, index):
            try: return super().__getitem__(index)
            except (OSError, Warning, Image.DecompressionBombError): return torch.zeros(3, 6, 6), 7
    data = Caught("images", augment=False)
    seen = []
    for epoch in range(6):
        {setting.format(on="(epoch % 2 == 0)")}
        for number, (x, y) in enumerate(DataLoader(data, batch_size=2)):
            seen.append([x.tolist(), y.tolist()])
            if epoch > 3 and number == 1: {setting.format(on="(epoch == 4)")}
    torch.save({{"seen": seen}}, "left.pt")
    """
    plan = {"keep": "decoded", "where": "disk", "cache_dir": "cache"} if where == "disk" else "decoded"
    plain, changed = train(IMAGES + script), train(IMAGES + script, sample_cache=plan)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left, changed.left)


def test_a_change_that_only_the_end_of_a_pass_shows_is_said(train: Train) -> None:
    script = f"""
    {NOT_LOOKED_OVER}
    import hasten.data.snapshot; hasten.data.snapshot._SHARE = 0  # as if there were no time for more
    class Labels(Dataset):
        def __init__(self): self.order, self.labels = np.arange(40)[::-1].copy(), np.zeros(1_200_000)
        def __len__(self): return 40
        def __getitem__(self, index): return float(self.labels[30_000 * self.order[index]])
    data = Labels()
    loader = DataLoader(data, batch_size=4)
    for epoch in range(4):
        for number, x in enumerate(loader):
            if epoch == 2 and number == 5: data.labels[30_000 * 5] += 1
        print("passed", file=sys.stderr, flush=True)
    torch.save({{}}, "left.pt")
    """
    said = train(IMAGES + script, sample_cache="samples").err.split("passed\n")
    assert "changed during a pass" not in "".join(said[:2])
    assert ".labels changed during a pass" in said[2]


def test_what_a_library_reads_unseen_is_left_alone_whatever_it_is_called(train: Train) -> None:
    """`safetensors` reads in Rust, which Python does not hear of."""
    pytest.importorskip("safetensors")
    script = """
    import safetensors.torch as st
    from safetensors.torch import load_file, save_file
    for number in range(8): save_file({"x": torch.full((2,), float(number))}, f"{number}.safetensors")
    time.sleep(0.03)
    class Latents(Dataset):
        def __len__(self): return 8
        def __getitem__(self, index): return READ(f"{index}.safetensors")["x"]
    seen = []
    for epoch in range(3):
        seen += [x.tolist() for x in DataLoader(Latents(), 2)]
        save_file({"x": torch.full((2,), 50.0 + epoch)}, "5.safetensors")
    torch.save({"seen": seen}, "left.pt")
    """
    for read in ("load_file", "st.load_file"):
        own = script.replace("READ", read)
        plain, changed = train(IMAGES + own), train(IMAGES + own, sample_cache="samples")
        assert plain.left == changed.left
        assert "left alone" in changed.installed["sample_cache"]


@pytest.mark.parametrize(
    ("setting", "reads"),
    [("torch.set_float32_matmul_precision(['medium', 'highest'][epoch % 2])", 12), ("np.seterr(invalid='raise')", 24)],
)
def test_a_setting_of_a_library_empties_the_cache_but_not_one_that_a_search_switches(
    train: Train, setting: str, reads: int
) -> None:
    script = f"""
    {NOT_LOOKED_OVER}
    def between(epoch): {setting}
    fit([DataLoader(Images('images', augment=False), batch_size=4, shuffle=True)], epochs=4, between=between)
    """
    assert compared(train, script, "samples") == (48, reads)
