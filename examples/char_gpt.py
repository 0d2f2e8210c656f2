"""Train a small GPT on characters: no DataLoader, batches cut from one long tensor.

The text comes from a small grammar.
"""

import argparse
import math
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

GRAMMAR = {
    "text": ["{line}\n{line}\n", "{line}\n", "\n{name}:\n{line}\n"],
    "line": ["{some} {verb} {some}.", "{some} {verb} {some}, and {some} {verb}.", "{ask} {some} {verb}?"],
    "some": ["the {noun}", "the {how} {noun}", "a {how} {noun}", "{name}", "{some} of {name}"],
    "name": ["Anna", "Boris", "Clara", "Duncan", "Eleanor", "Falstaff"],
    "noun": ["king", "river", "garden", "sword", "letter", "winter", "crown", "horse", "candle", "ship"],
    "how": ["old", "silent", "golden", "broken", "distant", "gentle", "bitter"],
    "verb": ["follows", "remembers", "fears", "carries", "betrays", "awaits", "sings"],
    "ask": ["Why say you", "Who knows if", "Is it true that", "When was it that"],
}


def write(rule, rng):
    template = rng.choice(GRAMMAR[rule])
    while "{" in template:
        start, end = template.index("{"), template.index("}")
        template = template[:start] + write(template[start + 1 : end], rng) + template[end + 1 :]
    return template


class Attention(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).bool())

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.qkv(x).split(c, 2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.heads)
        scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, width=128, heads=4, depth=4, context=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, context) for _ in range(depth)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.ln(self.blocks(x)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--context", type=int, default=128)
args = parser.parse_args()

torch.manual_seed(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"
rng = random.Random(0)
text = "".join(write("text", rng) for _ in range(12_000))
chars = sorted(set(text))
codes = torch.tensor([chars.index(c) for c in text])
train_data, val_data = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]


def get_batch(data):
    starts = torch.randint(len(data) - args.context - 1, (args.batch_size,))
    x = torch.stack([data[i : i + args.context] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + args.context] for i in starts])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss(model, batches=10):
    model.eval()
    loss = sum(model(*get_batch(val_data))[1].item() for _ in range(batches)) / batches
    model.train()
    return loss


model = GPT(len(chars), context=args.context).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
start = time.time()
for step in range(1, args.steps + 1):
    _, loss = model(*get_batch(train_data))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0 or step == args.steps:
        losses = f"train {loss.item():.3f}, val {estimate_loss(model):.3f}"
        print(f"step {step}: {losses}, {time.time() - start:.1f} s")
