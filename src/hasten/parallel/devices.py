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
    wanted = _read(devices)
    if not present:
        if isinstance(wanted, list):
            raise HastenError(
                f"devices={devices!r} names GPUs, but this training runs on the CPU.",
                f"Give the number of processes: devices={len(wanted)}.",
            )
        return [torch.device("cpu")] * (1 if wanted == -1 else wanted)
    indices = wanted if isinstance(wanted, list) else list(range(present if wanted == -1 else wanted))
    if missing := [index for index in indices if index >= present]:
        raise HastenError(
            f"devices={devices!r} asks for GPU {missing[0]}, but this machine shows {present}: 0 to {present - 1}.",
            f'Use devices="auto" or at most devices={present}; CUDA_VISIBLE_DEVICES may hide some.',
        )
    return [torch.device("cuda", index) for index in indices]


def _read(devices: Devices) -> int | list[int]:
    """Parse `devices=`. Return a number of devices (-1: all), or a list of indices."""
    wanted: int | list[int] | None = None
    if isinstance(devices, str):
        words = [word.strip() for word in devices.split(",") if word.strip()]
        if devices.strip() == "auto":
            wanted = -1
        elif words and all(word.removeprefix("-").isdigit() for word in words):
            wanted = [int(word) for word in words] if "," in devices else int(words[0])
    elif isinstance(devices, int) and not isinstance(devices, bool):
        wanted = devices
    elif isinstance(devices, list | tuple) and all(type(index) is int for index in devices):
        wanted = list(devices)
    if isinstance(wanted, list) and wanted and min(wanted) >= 0 and len(set(wanted)) == len(wanted):
        return wanted
    if isinstance(wanted, int) and (wanted == -1 or wanted > 0):
        return wanted
    raise HastenError(
        f"devices={devices!r} is not a choice of devices.",
        'Use "auto", a number of at least 1, -1 for all, or the indices of GPUs, each once, such as [0, 1].',
    )
