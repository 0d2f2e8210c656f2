"""The pages about the Trainer say what is true: flags, defaults, hooks and their order, links, code that runs."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hasten import Trainer
from hasten.trainer.callbacks import __all__ as callbacks
from hasten.trainer.config import Config
from hasten.trainer.config_docs import tables
from hasten.trainer.flags import OLD_FLAGS
from hasten.trainer.hooks import ModuleHooks
from hasten.trainer.logged import MAY_LOG
from tests.taps.forks import forked

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / name for name in ("trainer.md", "checkpoints.md", "from-lightning.md", "strategies.md")]
EXAMPLES = ROOT / "examples"


def text(name: str) -> str:
    return (DOCS / name).read_text()


def ran(script: Path, *arguments: str) -> str:
    """What a script of a page prints, run in its own folder by a fork that has torch imported."""
    done = forked(script.parent, script.name, *arguments)
    assert not done.code, done.out + done.err
    assert "Traceback" not in done.err, done.err
    return done.out


def run(script: Path, *arguments: str, cwd: Path) -> str:
    """The same of one that starts processes, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(page), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("title", tables())
def test_the_tables_of_flags_are_those_of_the_config(title):
    assert tables()[title] in text("trainer.md"), "python -m hasten.trainer.config_docs prints them"


def test_signature_and_docstring_have_the_flags_of_the_config():
    flags = {flag.name: flag.default for flag in dataclasses.fields(Config)}
    assert {name: p.default for name, p in inspect.signature(Trainer).parameters.items()} == flags
    for flag in dataclasses.fields(Config):
        assert f"        {flag.name}: {flag.metadata['doc']}." in Trainer.__doc__


def test_every_flag_of_old_is_there():
    page = text("from-lightning.md")
    assert [name for name in OLD_FLAGS if f"`{name}`" not in page] == []


def test_every_callback_and_hook_is_named():
    page = text("trainer.md")
    own = {"Callback", "EarlyStoppingReason", "LayerSummary", "Summary", "summarize"}
    assert [name for name in callbacks if name not in own and f"`{name}`" not in page] == []
    hooks = [name for name in vars(ModuleHooks) if not name.startswith("_") and "test" not in name]
    assert [name for name in hooks if "predict" not in name and f"{name}(" not in page] == []


@pytest.mark.parametrize("hook", ["training_step", "on_train_start", "validation_step", "on_test_epoch_end"])
def test_the_defaults_of_log(hook):
    _, _, on_step, on_epoch = MAY_LOG[hook]
    expected = (True, False) if hook == "training_step" else (False, True)
    assert (on_step, on_epoch) == expected, "docs/trainer.md has a table of these"


ORDER = """
import sys
import torch, hasten
from torch.utils.data import DataLoader, TensorDataset

called = []


class Told(hasten.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        called.append("training_step")
        return self.net(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        called.append("validation_step")

    def configure_optimizers(self):
        called.append("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def tell(name):
    own = getattr(hasten.Module, name)

    def hook(self, *args, **kwargs):
        called.append(name)
        return own(self, *args, **kwargs)

    return hook


for name in sys.argv[1:]:
    if name not in vars(Told) and hasattr(hasten.Module, name):
        setattr(Told, name, tell(name))
loader = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=4)
trainer = hasten.Trainer(max_epochs=1, num_sanity_val_steps=0, logger=False, enable_progress_bar=False)
trainer.fit(Told(), loader, loader)
print("called:", *called)
"""


def test_the_order_of_hooks(tmp_path):
    page = text("trainer.md").split("`fit` calls, in this order:")[1].split("```")[1]
    names = re.findall(r"^\s*(\w+)\(", page, flags=re.MULTILINE)
    (tmp_path / "order.py").write_text(ORDER)
    line = next(s for s in ran(tmp_path / "order.py", *names).splitlines() if s.startswith("called:"))
    transfers = [name for name in names if "transfer" in name]
    called = line.split()[1:]
    for name in transfers:  # once more, before the validation batch
        del called[len(called) - 1 - called[::-1].index(name)]
    assert called == [name for name in names if "sanity" not in name]


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            assert there.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.*)$", there.read_text(), flags=re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
                assert anchor in anchors, f"{page.name}: {target}"


def test_the_code_of_the_guide_runs(tmp_path):
    parts = blocks("trainer.md")
    alone = [part for part in parts if "__main__" in part]  # starts processes, which run the script up to there
    (tmp_path / "guide.py").write_text("\n".join(part for part in parts if part not in alone))
    said = ran(tmp_path / "guide.py")
    assert "['train_loss', 'val_loss/dataloader_idx_0', 'val_loss/dataloader_idx_1']" in said
    assert len(list(tmp_path.glob("hasten_logs/version_0/checkpoints/epoch=2-step=189.ckpt"))) == 1
    assert (tmp_path / "runs/digits/version_0/metrics.csv").exists()


@pytest.mark.slow  # each block of the guide starts processes
def test_the_code_of_the_guide_that_starts_processes_runs(tmp_path):
    parts = blocks("trainer.md")
    alone = [part for part in parts if "__main__" in part]
    assert len(alone) == 1
    module = parts[1].split("trainer =")[0]
    (tmp_path / "ddp.py").write_text("\n".join([parts[0].split("for epoch")[0], module, *alone]))
    run(tmp_path / "ddp.py", cwd=tmp_path)


@pytest.mark.slow  # it starts a second process
def test_the_code_about_strategies_runs(tmp_path):
    (tmp_path / "fsdp.py").write_text("\n".join(blocks("strategies.md")))
    run(tmp_path / "fsdp.py", cwd=tmp_path)
    assert list(tmp_path.glob("hasten_logs/version_0/checkpoints/*.ckpt"))


def test_the_loop_of_the_guide_and_its_module_end_alike(tmp_path):
    loop, module = blocks("trainer.md")[:2]
    seed = "torch.manual_seed(0)\n"
    loop = loop.replace("net = ", seed + "net = ")
    module = module.replace("trainer.fit(Digits(), loader)", seed + "digits = Digits()\ntrainer.fit(digits, loader)")
    check = "\nassert torch.equal(net.weight, digits.net.weight) and torch.equal(net.bias, digits.net.bias)\n"
    (tmp_path / "both.py").write_text(loop + module + check)
    ran(tmp_path / "both.py")


def test_the_code_about_checkpoints_runs(tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "checkpoints.py").write_text("\n".join(blocks("checkpoints.md")))
    assert "['net.bias', 'net.weight']" in ran(tmp_path / "checkpoints.py")


@pytest.mark.slow  # trains the example twice
def test_the_example_trains_and_goes_on(tmp_path):
    script = EXAMPLES / "trainer_digits.py"
    run(script, "--epochs", "1", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out/checkpoints/last.ckpt").exists()
    assert "accuracy on new digits" in run(script, "--epochs", "1", "--out", "out", "--resume", cwd=tmp_path)


@pytest.mark.slow  # imports Lightning in a process of its own
def test_the_lightning_example_runs(tmp_path):
    pytest.importorskip("lightning.pytorch")
    assert "val_loss" in run(EXAMPLES / "lightning_module.py", cwd=tmp_path)
