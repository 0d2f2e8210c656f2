"""For scripts that read hasten's checkpoints with Lightning: `import hasten.lightning` is all they need.

From then on `torch.load`, and so `load_from_checkpoint` of a LightningModule, understands them in this process. A
script that trains with hasten's Trainer need not import this.
"""

from hasten.trainer.lightning.loading import teach_loading

teach_loading()

__all__ = ["teach_loading"]
