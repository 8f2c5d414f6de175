"""The devices of this machine: which there are, and how long work takes on one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


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


def chosen(device: str) -> str:
    """The device that a setting means, once it is known to be there: auto is a GPU, where there is one."""
    check(device)
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def timed(work: Callable[[], Result], device: torch.device, count: int = 1) -> tuple[Result, float]:
    """The result of the last of `count` calls, and the seconds that all of them took on the device.

    A single CPU thread is charged for what it computes, not for the time in which other processes run.
    """
    import torch

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time if alone else time.perf_counter
    waits = device.type == "cuda"
    if waits:
        torch.cuda.synchronize(device)
    start = now()
    for _ in range(count):
        result = work()
    if waits:
        torch.cuda.synchronize(device)
    return result, now() - start


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what torch has reserved but does not use."""
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)
