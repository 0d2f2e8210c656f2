"""Sentences of different lengths, in batches of like ones."""

# also: full_precision, launch_bound
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def padded(sentences):
    return pad_sequence(sentences, batch_first=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    lengths = torch.randint(32, 64, (4000,)).sort().values
    sentences = [torch.randint(1, 256, (int(length),)) for length in lengths]
    batches = [list(range(start, start + 32)) for start in range(0, 4000 - 32, 32)]
    order = torch.randperm(len(batches)).tolist()
    loader = DataLoader(
        sentences, batch_sampler=[batches[i] for i in order], collate_fn=padded, num_workers=1, persistent_workers=True
    )
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    for tokens in loader:
        optimizer.zero_grad()
        out = model(tokens)[:, :-1]
        nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0).backward()
        optimizer.step()
        schedule.step()
