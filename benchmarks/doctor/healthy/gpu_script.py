"""A training for a GPU, as the guides would have it (read, not run)."""

# how: source
import torch
from torch import nn
from torch.utils.data import DataLoader


def train(dataset, model, optimizer, schedule, epochs, device):
    loader = DataLoader(
        dataset, batch_size=256, shuffle=True, num_workers=8, pin_memory=True, persistent_workers=True, drop_last=True
    )
    for epoch in range(epochs):
        model.train()
        running = torch.zeros((), device=device)
        for step, (images, targets) in enumerate(loader):
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            targets = targets.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
            running += loss.detach()
            if step % 100 == 0:
                print(epoch, step, loss.item())
        print(epoch, (running / len(loader)).item())


@torch.inference_mode()
def validate(model, loader, device):
    model.eval()
    right = torch.zeros((), device=device)
    for images, targets in loader:
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        right += (model(images).argmax(1) == targets).sum()
    return right.item() / len(loader.dataset)
