"""`hasten run --devices`: what several processes cannot do alike is refused in one message. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.cli.devices import Devices
from hasten.errors import HastenError
from tests.cli.test_devices import SLOW, loop, on
from tests.taps.forks import command


@SLOW
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"before": "torch.distributed.init_process_group('gloo')"}, "written for several processes already"),
        ({"before": "step(*data[:8])"}, "calls backward before any DataLoader gave a batch"),
        ({"more": ", batch_size=None", "first": "x, y = x.repeat(4, 1), y.repeat(4, 1)"}, "batch_size=None"),
        ({"first": "w = x.clone().requires_grad_(); w.mean().backward()"}, "reaches no parameter"),
        ({"before": "torch.optim.LBFGS(model.parameters())"}, "LBFGS"),
        (
            {
                "before": "table = nn.Embedding(3, 4, sparse=True)",
                "first": "table(torch.tensor([1])).mean().backward()",
            },
            "is sparse",
        ),
        ({"first": "nn.functional.mse_loss(model(x), y, reduction='sum').backward()"}, "a sum over the batch"),
    ],
    ids=["distributed", "no loader", "no batches", "nothing known", "LBFGS", "sparse", "a sum"],
)
def test_what_cannot_be_carried_is_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    loop(tmp_path, **changes)  # type: ignore[arg-type]
    if "batch_size" in changes.get("more", ""):
        text = (tmp_path / "train.py").read_text()
        (tmp_path / "train.py").write_text(text.replace("data, 8, shuffle=True", "data, shuffle=True"))
    done = on(2, tmp_path, "train.py", timeout=60)
    assert done.code in (1, 2), done.err
    assert "Traceback" not in done.err
    assert said in done.err
    assert done.err.splitlines()[-2].startswith("hasten: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("2", "auto", "all", 1, "", ""), "--batch all: not known"),
        (("2", "tpu", "global", 1, "", ""), "--accelerator tpu: not known"),
        (("2", "auto", "global", 2, "", ""), "--nodes 2 needs --rdzv-endpoint HOST:PORT"),
        (("2", "auto", "global", 2, "node1", ""), "--nodes 2 needs --rdzv-endpoint HOST:PORT"),
        (("", "auto", "global", 2, "a:1", ""), "--devices is missing"),
        (("2", "auto", "global", 1, "a:1", ""), "--rdzv-endpoint is for --nodes 2 and more"),
        (("2", "auto", "global", 2, "a:1", "is_host"), "is_host has no value"),
    ],
)
def test_options_that_are_wrong_are_refused(options: tuple[str, str, str, int, str, str], said: str) -> None:
    wide = Devices(*options)
    with pytest.raises(HastenError) as refused:
        wide.check()
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--devices", "2", "--auto", "train.py"), "they exclude --devices"),
        (("--devices", "2", "torchrun", "train.py"), "torchrun starts processes itself"),
        (("--devices", "2", "ls"), "ls is not a Python script"),
        (("--devices", "2", "nothing.py"), "no such script: nothing.py"),
        pytest.param(("--devices", "two", "train.py"), "is not a choice of devices", marks=SLOW),
        pytest.param(("--devices", "1", "train.py"), "one device", marks=SLOW),
        pytest.param(("--devices", "2", "--accelerator", "gpu", "train.py"), "sees no GPU", marks=SLOW),
    ],
)
def test_commands_that_are_wrong_are_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    loop(tmp_path)
    done = command(tmp_path, "run", *words)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
