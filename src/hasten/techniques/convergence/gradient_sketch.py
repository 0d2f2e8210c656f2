"""A sketch of gradients: few numbers whose inner products are those of the whole (random signs, folded)."""

from __future__ import annotations

import torch

WIDTH = 2**18  # numbers that are kept of a gradient; of a longer one, sums under random signs
_SEED = 20181214


def sketch(gradients: list[torch.Tensor | None], sizes: list[int], width: int = WIDTH) -> torch.Tensor:
    """Return gradients one behind the other in at most `width` numbers, on the CPU.

    Longer ones are folded: every number goes, under a random sign, to its own place modulo `width`; signs are the same
    in each call. In the mean, inner products stay what they are; they are off by about 1 / sqrt(width), 0.2 %, of the
    product of the norms.

    Args:
        gradients: None for parameters that have none: zeros.
        sizes: How many numbers each has.
        width: Most numbers of the answer.
    """
    total = sum(sizes)
    kept = torch.zeros(min(total, width))
    place = 0
    for number, (gradient, size) in enumerate(zip(gradients, sizes, strict=True)):
        if gradient is None:
            place = (place + size) % len(kept)
            continue
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1).float()
        if total > width:
            draw = torch.Generator(flat.device).manual_seed(_SEED + number)  # parameters share places, and no signs
            signs = torch.randint(0, 2, flat.shape, generator=draw, device=flat.device, dtype=torch.int8)
            flat = flat * signs.mul_(2).sub_(1)
        done = 0
        while done < size:
            many = min(size - done, len(kept) - place)
            kept[place : place + many] += flat[done : done + many].cpu()
            done, place = done + many, (place + many) % len(kept)
    return kept
