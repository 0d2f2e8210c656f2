"""Progress and ModelSummary: what a person sees, on a terminal and elsewhere."""

import os
import pty
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hasten.trainer.callbacks import ModelSummary, Progress, summarize
from tests.taps.forks import forked, run_in_fork
from tests.taps.scripts import write
from tests.trainer.callbacks.trainings import BATCHES, Regression, trained

ROOT = str(Path(__file__).parents[3])


def test_elsewhere_one_plain_line_an_epoch(tmp_path, capsys):
    trained(tmp_path, [Progress()], epochs=3, enable_progress_bar=None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for epoch, line in enumerate(lines, start=1):
        pattern = rf"epoch {epoch}/3  {BATCHES}/{BATCHES} batches  \d+\.\d it/s  \d:\d\d  train_loss \d"
        assert re.match(pattern, line), line


def test_the_loss_is_shown_where_nothing_is_logged(tmp_path, capsys):
    class Silent(Regression):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return torch.nn.functional.mse_loss(self.layers(x), y)

    trained(tmp_path, [Progress()], Silent(), enable_progress_bar=None, validate=False)
    assert re.search(r"  loss \d\.\d", capsys.readouterr().out)


def test_switched_off(tmp_path, capsys):
    trained(tmp_path, [Progress(refresh_rate=0)], enable_progress_bar=None)
    assert capsys.readouterr().out == ""


def test_it_imports_rich_only_on_a_terminal(tmp_path):
    code = f"import sys; sys.path.append({ROOT!r})\n"
    code += "assert 'rich' not in sys.modules\n"
    code += "from tests.trainer.callbacks.trainings import trained\n"
    code += f"trained({str(tmp_path)!r}, [], enable_progress_bar=True)\nprint('rich' in sys.modules)"
    write(tmp_path, "train.py", code)
    done = forked(tmp_path, "train.py")
    assert done.out.splitlines()[-1] == "False", done.err


def test_on_a_terminal_a_live_line_that_leaves_it_clean(tmp_path):
    code = f"import sys, time; sys.path.append({ROOT!r})\n"
    code += "from tests.trainer.callbacks.trainings import Regression, trained\n"
    code += "class Slow(Regression):\n"
    code += "    def training_step(self, *args):\n"
    code += "        time.sleep(0.05); print('said by the step'); return super().training_step(*args)\n"
    code += "    def validation_step(self, *args):\n"
    code += "        time.sleep(0.06); super().validation_step(*args)\n"
    code += f"trained({str(tmp_path)!r}, [], Slow(), epochs=2, enable_progress_bar=True)"
    script = write(tmp_path, "train.py", code)
    before = "import os; os.environ.update(COLUMNS='100', LINES='20', TERM='xterm'); os.environ.pop('NO_COLOR', None)"
    main, terminal = pty.openpty()
    path = Path(os.ttyname(terminal))
    with ThreadPoolExecutor(1) as runs:
        run = runs.submit(run_in_fork, script, tmp_path, path, path, before=before)
        run.add_done_callback(lambda _: os.close(terminal))
        shown = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    text = shown.decode()
    assert run.result() == 0, text
    assert "█" in text
    assert "it/s" in text
    assert "validation" in text
    assert text.count("said by the step") == 2 * BATCHES
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is back
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()
    assert any(line.strip().startswith("epoch 2/2") and f"{BATCHES}/{BATCHES}" in line for line in last)


def test_summary(tmp_path, capsys):
    trained(tmp_path, [ModelSummary(2)], enable_model_summary=None)
    table = capsys.readouterr().out
    assert re.search(r"layers +Sequential +49", table)
    assert re.search(r"layers\.0 +Linear +40", table)
    assert "49 parameters" in table


def test_summary_counts_shared_and_frozen_parameters_rightly():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4), torch.nn.LazyLinear(3))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    summary = summarize(model, max_depth=1)
    assert (summary.total_parameters, summary.trainable_parameters) == (20, 16)
    assert [layer.parameters for layer in summary.layers] == [16, 20, 0]
    assert summary.lazy
    assert "4 frozen" in str(summary)
    assert summarize(model, max_depth=0).layers == ()


@pytest.mark.parametrize("depth", [0, -1])
def test_depth(tmp_path, capsys, depth):
    trained(tmp_path, [ModelSummary(depth)], enable_model_summary=None)
    assert ("layers.0" in capsys.readouterr().out) == (depth == -1)
