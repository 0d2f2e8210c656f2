"""Resolve `accelerator=` and `devices=` to the devices of this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hasten.errors import HastenError

Devices = int | str | Sequence[int]


def choose_devices(accelerator: str = "auto", devices: Devices = "auto") -> list[torch.device]:
    """Return the devices of this machine to train on, one per process.

    Args:
        accelerator: "cpu", "gpu" or "cuda" (the same), or "auto": GPUs where there are any.
        devices: A number of devices; "auto" or -1 for all GPUs (one process on a CPU); for GPUs also their indices, as
            a list or as "0,1". A string with a single number is a count: "2" means two devices.

    Returns:
        Devices by local rank; on a CPU the same device once per process.

    Raises:
        HastenError: A value is not understood, or asks for more devices than there are.
    """
    if accelerator not in {"auto", "cpu", "gpu", "cuda"}:
        raise HastenError(f"accelerator={accelerator!r} is unknown.", 'Use "auto", "cpu", "gpu" or "cuda".')
    present = torch.cuda.device_count() if accelerator != "cpu" else 0
    if accelerator in {"gpu", "cuda"} and not present:
        raise HastenError(
            f"accelerator={accelerator!r}, but torch {torch.__version__} sees no GPU here.",
            'Use accelerator="auto" or "cpu", or look at CUDA_VISIBLE_DEVICES, nvidia-smi and the build of torch.',
        )
    chosen = _read(devices)
    if not present:
        if isinstance(chosen, list):
            raise HastenError(
                f"devices={devices!r} names GPUs, but this training runs on the CPU.",
                f"Give the number of processes: devices={len(chosen)}.",
            )
        return [torch.device("cpu")] * (1 if chosen == -1 else chosen)
    indices = chosen if isinstance(chosen, list) else list(range(present if chosen == -1 else chosen))
    if missing := [index for index in indices if index >= present]:
        raise HastenError(
            f"devices={devices!r} asks for GPU {missing[0]}, but this machine shows {present}: 0 to {present - 1}.",
            f'Use devices="auto" or at most devices={present}; CUDA_VISIBLE_DEVICES may hide some.',
        )
    return [torch.device("cuda", index) for index in indices]


def _read(devices: Devices) -> int | list[int]:
    """Parse `devices=`. Return a number of devices (-1: all), or a list of indices."""
    chosen: int | list[int] | None = None
    if isinstance(devices, str):
        words = [word.strip() for word in devices.split(",") if word.strip()]
        if devices.strip() == "auto":
            chosen = -1
        elif words and all(word.removeprefix("-").isdigit() for word in words):
            chosen = [int(word) for word in words] if "," in devices else int(words[0])
    elif isinstance(devices, int) and not isinstance(devices, bool):
        chosen = devices
    elif isinstance(devices, list | tuple) and all(type(index) is int for index in devices):
        chosen = list(devices)
    if isinstance(chosen, list) and chosen and min(chosen) >= 0 and len(set(chosen)) == len(chosen):
        return chosen
    if isinstance(chosen, int) and (chosen == -1 or chosen > 0):
        return chosen
    raise HastenError(
        f"devices={devices!r} is not a choice of devices.",
        'Use "auto", a number of at least 1, -1 for all, or the indices of GPUs, each once, such as [0, 1].',
    )
