"""What lies around: threads, companions, and where a dataset's files are."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import Dataset, Subset

from hasten.doctor.observe.process_environment import filesystem, folder_of
from tests.doctor.observe.listening import HEAD, observed


def test_a_script_with_images(tmp_path: Path) -> None:
    _, evidence = observed(
        tmp_path,
        HEAD
        + """
import os
from pathlib import Path
from PIL import Image
class Images(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.jpg"))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        Image.open(self.paths[index]).convert("RGB")
        return torch.randn(6), index % 3
os.mkdir("images")
for number in range(32):
    Image.new("RGB", (8, 8)).save(f"images/{number}.jpg")
torch.set_num_threads(2)
images = torch.utils.data.Subset(Images("images"), range(32))
for epoch in range(14):
    for x, y in DataLoader(images, batch_size=16):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
torch.set_num_threads(1)
""",
        OMP_NUM_THREADS="1,1",
        LOCAL_WORLD_SIZE="2",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    around = evidence.surroundings
    assert around is not None
    assert (around.omp_threads, around.threads, around.processes) == (1, 2, 2)
    assert around.interop_threads >= 1
    assert around.allocator == "expandable_segments:True"
    assert around.data_folder == str(tmp_path / "images")
    assert around.filesystem != ""
    assert around.jpeg in ("libjpeg-turbo", "libjpeg")


@pytest.mark.parametrize(
    "attributes",
    [
        {"root": "{folder}"},
        {"samples": [("{folder}/a.jpg", 0), ("{folder}/b.jpg", 1)]},
        {"names": ["{folder}/a.jpg"]},
        {"file": "{folder}/a.jpg"},
    ],
)
def test_folders_of_datasets(tmp_path: Path, attributes: dict[str, object]) -> None:
    (tmp_path / "a.jpg").touch()

    def filled(value: object) -> object:
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value))
        return value.format(folder=tmp_path) if isinstance(value, str) else value

    dataset = SimpleNamespace(**{name: filled(value) for name, value in attributes.items()})
    assert folder_of(dataset) == str(tmp_path)


def test_folders_of_datasets_in_a_split_of_a_split(tmp_path: Path) -> None:
    class Files(Dataset[int]):
        def __init__(self) -> None:
            self.root = str(tmp_path)

        def __getitem__(self, index: int) -> int:
            return index

    assert folder_of(Subset(Subset(Files(), [0, 1, 2]), [0, 1])) == str(tmp_path)


def test_datasets_without_files() -> None:
    for dataset in (SimpleNamespace(name="train", text="a / b", size=3, words=["a", "b"]), [1, 2], range(3), object()):
        assert folder_of(dataset) == ""


def test_filesystems(tmp_path: Path) -> None:
    kind, _ = filesystem(tmp_path)
    assert kind == os.popen(f"stat -f -c %T {tmp_path}").read().strip().replace("ext2/ext3", "ext4").replace(
        "overlayfs", "overlay"
    )
    assert filesystem(Path("/proc")) == ("proc", None)
    assert filesystem(Path("/nowhere/at/all")) == ("", None)
