"""Flags of the Trainer that change what a step does, and its techniques."""

import pytest
import torch

import hasten
from hasten import Plan
from hasten.callbacks import GradientAccumulationScheduler
from hasten.techniques.memory.host_embeddings import HostEmbeddings
from tests.trainer.flags.trained import Counting, fitted
from tests.trainer.trainings import Regression, loader, quiet

pytestmark = pytest.mark.filterwarnings("ignore")


def test_accumulate_grad_batches(tmp_path):
    def steps(every, epochs=1):
        return fitted(accumulate_grad_batches=every, max_epochs=epochs).trainer.global_step

    assert [steps(every) for every in (1, 2, 3, 99)] == [4, 2, 2, 1]
    assert steps({0: 1, 1: 4, 3: 2}, epochs=4) == 4 + 1 + 1 + 2
    assert steps({2: 4}, epochs=3) == 4 + 4 + 1
    trainer = quiet(accumulate_grad_batches={2: 4})
    assert any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)


def test_optimizer_in_backward(tmp_path):
    class Watching(Counting):
        def on_train_start(self):
            self.changed = 0
            first, last = self.net[0].weight, self.net[-1].weight
            first.register_post_accumulate_grad_hook(lambda _: setattr(self, "changed", last._version))

    assert fitted(Watching(), optimizer_in_backward=True).changed > fitted(Watching()).changed  # the last was stepped


def test_microbatch(tmp_path):
    looks = 2 * (2 + 2 + 4)  # at the first batch and the fourth: in parts as they are run, first with last, and smaller
    assert fitted(microbatch=4).count("train") == 2 * 4 + looks
    assert fitted(microbatch=4).trainer.global_step == 4


def test_gradient_clip_val(tmp_path):
    class Norms(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(optimizer_closure)
            self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])

    assert fitted(Norms(), gradient_clip_val=0.01).norm <= 0.01
    assert fitted(Norms(), gradient_clip_val=0).norm > 0.01


def test_gradient_clip_algorithm(tmp_path):
    class Largest(Regression):
        def on_before_zero_grad(self, optimizer):
            if self.trainer.global_step:
                self.largest = max(float(p.grad.abs().max()) for p in self.parameters())

    assert fitted(Largest(), gradient_clip_val=0.001, gradient_clip_algorithm="value").largest == pytest.approx(0.001)
    assert fitted(Largest(), gradient_clip_val=0.001, gradient_clip_algorithm="norm").largest < 0.001


def test_seed(tmp_path):
    quiet(seed=11)
    first = torch.rand(3)
    quiet(seed=11)
    assert torch.equal(torch.rand(3), first)


def test_plan(tmp_path):
    assert [one.name for one in quiet(plan=Plan({"batched_fetch": True})).run.techniques] == ["batched_fetch"]


def technique_of(**flags):
    [technique] = quiet(**flags).run.techniques
    return technique.name, technique.setting


def test_compile(tmp_path):
    assert technique_of(compile=True) == ("compile", "default")
    assert technique_of(compile="reduce-overhead") == ("compile", "reduce-overhead")
    budget = {"mode": "default", "activation_budget": 0.5}
    assert technique_of(compile=budget) == ("compile", budget)


def test_channels_last(tmp_path):
    assert technique_of(channels_last=True) == ("channels_last", True)


def test_fused_optimizer(tmp_path):
    assert technique_of(fused_optimizer=True) == ("fused_optimizer", True)


def test_device_prefetch(tmp_path):
    names = [technique.name for technique in quiet(device_prefetch=True).run.techniques]
    assert names == ["pin_memory", "device_prefetch"]


def test_batched_fetch(tmp_path):
    trainer = quiet(batched_fetch=True)
    trainer.fit(Regression(), loader())
    assert trainer.run.techniques[0].acted  # that it changes no bit stands in test_same_weights


def test_activation_checkpointing(tmp_path):
    assert technique_of(activation_checkpointing="Block") == ("activation_checkpointing", "Block")
    assert technique_of(activation_checkpointing="net.0-2") == ("activation_checkpointing", "net.0-2")


def test_activation_offload(tmp_path):
    assert technique_of(activation_offload=True) == ("activation_offload", True)
    with pytest.raises(hasten.HastenError, match="activation_checkpointing does not keep what it would move"):
        quiet(activation_offload=True, activation_checkpointing=True)


def test_host_embeddings(tmp_path, monkeypatch):
    class Words(hasten.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Embedding(4200, 64, padding_idx=0), torch.nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            return self.net((batch[0].abs() * 30).long()).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    monkeypatch.setattr(HostEmbeddings, "device", "cpu")  # in the place of a GPU, so that rows take their way
    for embedding in (torch.nn.Embedding, torch.nn.EmbeddingBag):  # a forward stays replaced while a table needs it
        monkeypatch.setattr(embedding, "forward", embedding.forward)
    left = []
    for size in (None, 1):
        trainer = quiet(host_embeddings=size, max_epochs=2, gradient_clip_val=0.1, accumulate_grad_batches=2)
        trainer.fit(Words(), loader())
        trainer.save_checkpoint(tmp_path / f"{size}.ckpt")
        left.append(trainer.model.state_dict())
    assert trainer.run.installed() == {"host_embeddings": "table"}
    assert all(torch.equal(left[0][name], left[1][name]) for name in left[0])
    for size, other in ((None, 1), (1, None)):  # each goes on from the other's checkpoint
        trainer = quiet(host_embeddings=size, max_epochs=3)
        trainer.fit(Words(), loader(), ckpt_path=tmp_path / f"{other}.ckpt")
        left.append(trainer.model.state_dict())
    assert all(torch.equal(left[2][name], left[3][name]) for name in left[2])
    assert not all(torch.equal(left[0][name], left[2][name]) for name in left[0])


def test_fp8():
    """What it computes stands in tests/techniques/test_fp8.py."""
    with pytest.raises(hasten.HastenError, match="fp8"):  # neither a GPU nor torchao, or one that is too old
        quiet(fp8=True, accelerator="cpu")


def test_chunked_loss(tmp_path):
    class Words(Regression):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0]) @ torch.ones(1, 2**18)
            return torch.nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    plain = torch.nn.functional.cross_entropy
    trainer = quiet(chunked_loss=True, max_epochs=1, gradient_clip_val=1.0, accumulate_grad_batches=2)
    trainer.fit(Words(), loader())
    assert trainer.run.installed() == {"chunked_loss": "loss"}
    assert torch.nn.functional.cross_entropy is plain
