"""GradientNoiseScale: a training whose noise scale is known."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import HastenError
from hasten.callbacks import GradientNoiseScale
from tests.trainer.trainings import Regression, loader, quiet

TRUTH = 50 / 8**2  # tr(Sigma) is 50, and the weights stay where |G| is 8


class Mean(hasten.Module):
    """A sample's gradient is w - x, with x around 0 and a spread of 1 in each of 50 dimensions."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((50,), 8 / math.sqrt(50)))
        self.rate = rate

    def training_step(self, batch, batch_idx):
        return 0.5 * (self.w - batch[0]).square().sum(1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def samples():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(1600, 50, generator=generator)), batch_size=8)


def test_the_noise_scale_of_a_known_law_is_logged():
    watch = GradientNoiseScale(every_n_steps=1, over=50)
    trainer = quiet(callbacks=[watch], accumulate_grad_batches=4, gradient_clip_val=0.1)
    trainer.fit(Mean(), samples())
    assert watch.value == pytest.approx(TRUTH, rel=0.25)
    assert float(trainer.callback_metrics["noise_scale"]) == pytest.approx(watch.value)


def test_it_changes_nothing_and_goes_on_from_a_checkpoint(tmp_path):
    ends = []
    for callbacks in ([], [GradientNoiseScale(every_n_steps=3)]):
        module = Mean(rate=0.05)
        trainer = quiet(callbacks=callbacks, accumulate_grad_batches=4)
        trainer.fit(module, samples())
        ends.append(module.w.detach())
    assert torch.equal(*ends)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = GradientNoiseScale(every_n_steps=10**6)  # looks at step 0 alone
    quiet(callbacks=[again], accumulate_grad_batches=4, max_epochs=2).fit(
        Mean(rate=0.05), samples(), ckpt_path=tmp_path / "last.ckpt"
    )
    assert again.value == callbacks[0].value


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({}, "one batch a step"),
        ({"accumulate_grad_batches": 2, "microbatch": 4}, "microbatch=4"),
        ({"accumulate_grad_batches": 2, "optimizer_in_backward": True}, "accumulate_grad_batches"),
    ],
)
def test_what_it_cannot_be_told_from_is_refused(flags, why):
    with pytest.raises(HastenError, match=why):
        quiet(callbacks=[GradientNoiseScale()], **flags).fit(Regression(), loader())


def test_nonsense_is_refused():
    with pytest.raises(HastenError, match="1 or more"):
        GradientNoiseScale(every_n_steps=0)
