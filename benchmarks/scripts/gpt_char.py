"""A small character-level GPT on tinyshakespeare, as nanoGPT does it: random blocks, no DataLoader.

    python gpt_char.py --epochs 3 --train-size 1600

An "epoch" is `--train-size` random blocks; nanoGPT calls it an evaluation interval.
`gpt_char_tuned.py` is the same training as an expert would speed it up by hand.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "tinyshakespeare.txt"


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(y.transpose(1, 2).contiguous().view(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, block: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.norm(self.blocks(self.tokens(x) + self.positions(positions)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def load_text(path: Path) -> tuple[Tensor, Tensor, int]:
    """Training text, validation text (the last tenth), and the number of different characters."""
    text = path.read_text(encoding="utf-8")
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    data = torch.tensor([index[character] for character in text])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(characters)


def get_batch(data: Tensor, batch_size: int, block: int, device: str) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - block, (batch_size,)).tolist()
    x = torch.stack([data[i : i + block] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + block] for i in starts])
    return x.to(device), y.to(device)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A small character-level GPT.")
    parser.add_argument("--data", type=Path, default=TEXT)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train-size", type=int, default=4000, help="blocks per epoch")
    parser.add_argument("--val-size", type=int, default=400, help="blocks per validation")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("gpt_char.pt"))
    return parser


def main() -> None:
    args = make_parser().parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_data, val_data, vocabulary = load_text(args.data)
    model = GPT(vocabulary, args.block, args.layers, args.width, args.heads, args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
    train_steps = args.train_size // args.batch_size
    val_steps = args.val_size // args.batch_size

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        model.train()
        train_loss = 0.0
        for _ in range(train_steps):
            x, y = get_batch(train_data, args.batch_size, args.block, device)
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            train_loss += loss.item()
        trained = time.perf_counter()

        model.eval()
        val_loss = 0.0
        with torch.no_grad():
            for _ in range(val_steps):
                x, y = get_batch(val_data, args.batch_size, args.block, device)
                val_loss += model(x, y).item()
        validated = time.perf_counter()
        print(
            f"epoch {epoch}: {trained - start:.3f} s train, {validated - trained:.3f} s validation, "
            f"loss {train_loss / train_steps:.4f}, validation loss {val_loss / val_steps:.4f}",
            flush=True,
        )
        torch.save({"epoch": epoch, "model": model.state_dict()}, args.checkpoint)


if __name__ == "__main__":
    main()
