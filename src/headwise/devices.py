"""Which devices there are: a name is checked before anything is written."""

from __future__ import annotations

import re

from headwise.errors import HeadwiseError


def check(device: str) -> None:
    """Refuse a device that is unknown or not in this machine: auto, cpu, cuda or one GPU such as cuda:1."""
    if device in ("auto", "cpu"):
        return
    match = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device)
    if match is None:
        raise HeadwiseError(f"no device is called '{device}'; give --device auto, cpu or cuda.")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise HeadwiseError(f"--device {device}: no CUDA device was found; give --device cpu.")
    if int(match[1] or 0) >= count:
        last = f"cuda:{count - 1}"
        raise HeadwiseError(f"--device {device}: there are {count} CUDA devices, the last is {last}; give that one.")
