"""Two networks against each other; the discriminator sees detached images."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh())
judge = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))
of_generator = torch.optim.AdamW(generator.parameters(), lr=2e-4, betas=(0.5, 0.99), weight_decay=0.0, fused=True)
of_judge = torch.optim.AdamW(judge.parameters(), lr=2e-4, betas=(0.5, 0.99), weight_decay=0.0, fused=True)
schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 150) for one in (of_generator, of_judge)]
for step in range(150):
    real = torch.randn(64, 784).clamp(-1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        fake = generator(torch.randn(64, 64))
        loss = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(fake.detach())).mean()
    of_judge.zero_grad()
    loss.backward()
    of_judge.step()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.softplus(-judge(fake)).mean()
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
    for schedule in schedules:
        schedule.step()
