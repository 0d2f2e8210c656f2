"""A recurrent network whose gradients nobody bounds."""

# plant: no_gradient_clipping
# also: full_precision
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(500, 64), nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 500)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
for step in range(80):
    tokens = torch.randint(0, 500, (16, 33))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    schedule.step()
