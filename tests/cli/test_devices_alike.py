"""`hasten run --devices`: what would differ between ranks without a word is made alike, or refused. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_devices import far, loop, on
from tests.taps.scripts import plain, write

pytestmark = pytest.mark.slow  # each starts a launcher and two ranks that import torch: 4 to 10 s

SPLIT = """
order = np.random.default_rng().permutation(32)
data = torch.utils.data.Subset(data, order[:24].tolist())
loader = DataLoader(data, 8, shuffle=True)
print(*data.indices, file=sys.stderr)
"""


def lines(text: str) -> str:
    """Lines of a test's own, within the script."""
    return text.strip().replace("\n", "\n    ")


def test_a_split_by_a_generator_of_numpys_without_a_seed_is_one_split(tmp_path: Path) -> None:
    loop(tmp_path, before="import numpy as np\n    " + lines(SPLIT))
    done = on(2, tmp_path, "train.py", options=("--quiet",))
    assert done.code == 0, done.err
    one, other = (line.removeprefix("[rank 1] ") for line in done.err.splitlines())
    assert one == other


@pytest.mark.parametrize("shuffle", ["True", "False"])
def test_a_split_that_differs_is_refused(tmp_path: Path, shuffle: str) -> None:
    split = SPLIT.replace("np.random.default_rng().permutation(32)", "random.SystemRandom().sample(range(32), 32)")
    split = split.replace(".tolist()", "").replace("shuffle=True", f"shuffle={shuffle}")
    loop(tmp_path, before="import random\n    " + lines(split), epochs=1_000_000)
    done = on(2, tmp_path, "train.py", timeout=60)
    assert done.code == 1, done.err
    assert "The ranks have parted: the dataset of the DataLoader at" in done.err
    assert "does not hold the same on all of them" in done.err


def test_a_pass_that_was_taken_for_training_is_told_when_it_trained_nothing(tmp_path: Path) -> None:
    loop(tmp_path, after="print(sum(len(model.eval()(x)) for x, y in loader))")
    done = on(2, tmp_path, "train.py")
    assert done.code == 0, done.err
    assert done.out == "28\n"  # of 32: eval() comes when rank 0 has its share of the first batch
    assert "train.py:12 trained nothing, which was known only after" in done.err
    loop(tmp_path, after="model.eval()\n    print(sum(len(model(x)) for x, y in loader))")
    done = on(2, tmp_path, "train.py")
    assert done.out == "32\n"
    assert "trained nothing" not in done.err


AHEAD = """
batches = iter(loader)
after = next(batches)
while after is not None:
    (x, y), after = after, next(batches, None)
    step(x, y)
torch.save(model.state_dict(), sys.argv[1])
sys.exit()
"""


def test_a_loop_that_fetches_ahead_is_refused_where_batches_are_uneven(tmp_path: Path) -> None:
    for more in (", drop_last=True", ""):
        loop(tmp_path, before=lines(AHEAD), more=more)
        script = (tmp_path / "train.py").read_text().replace("data, 8,", "data, 10,")
        (tmp_path / "train.py").write_text(script.replace("nn.BatchNorm1d(8), ", ""))
        assert plain(tmp_path, "train.py", "alone.pt").code == 0
        done = on(2, tmp_path, "train.py", "wide.pt")
        if more:
            assert done.code == 0, done.err
            assert far(tmp_path / "alone.pt", tmp_path / "wide.pt") < 2e-6
        else:
            assert done.code == 2, done.err
            assert "fetches a batch ahead of the one that it trains on" in done.err


REMOVED = """
torch.save(model.state_dict(), "best-0.1.pt")
os.rename("best-0.1.pt", "kept.pt")
time.sleep(rank)
model.load_state_dict(torch.load("kept.pt"))
os.remove("kept.pt")
torch.save({"second": 2}, "kept.pt")
assert torch.load("kept.pt") == {"second": 2}
torch.save({"third": 3}, "kept.pt")
"""


def test_a_file_that_is_removed_when_rank_0_has_loaded_it(tmp_path: Path) -> None:
    loop(tmp_path, after=lines(REMOVED))
    done = on(2, tmp_path, "train.py")
    assert done.code == 0, done.err


FILES = """
    import os, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, i):
            return torch.load(f"samples/{i}.pt")

    torch.manual_seed(0)
    if not os.path.exists("samples"):
        os.mkdir("samples")
        for i in range(9):
            torch.save(torch.full((1,), float(i)), f"samples/{i}.pt")
        sys.exit()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for epoch in range(2):
        for x in DataLoader(Files(), 9, shuffle=True):  # shares of 5 and 4
            model(x).mean().backward()
            optimizer.step()
    torch.save(model.state_dict(), "best.pt")
    model.load_state_dict(torch.load("best.pt"))
    print(model.weight.item(), file=sys.stderr)
"""


def test_a_checkpoint_behind_unequally_many_samples_that_are_files(tmp_path: Path) -> None:
    write(tmp_path, "train.py", FILES)
    assert plain(tmp_path, "train.py").code == 0
    done = on(2, tmp_path, "train.py", options=("--quiet",), timeout=60)
    assert done.code == 0, done.err
    one, other = (line.removeprefix("[rank 1] ") for line in done.err.splitlines())
    assert one == other
