"""Several processes that share one run, as torchrun starts them: whose work is what, and sums over all of them.

    torchrun --nproc-per-node 4 -m headwise run MODEL --budget kv=75% --out runs/x

Every process holds both models and reads its own part of the text; the first alone writes files, into a folder that
all of them see. A single process, the common case, gets its own values back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from headwise import devices
from headwise.errors import HeadwiseError

T = TypeVar("T")
PATIENCE = timedelta(hours=12)  # the others wait while the first one reads, writes or verifies


def begin(device: str) -> str:
    """Join the processes that were started with this one, once, and say which device this one computes on."""
    devices.check(device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and distributed.is_available() and not distributed.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    return device


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def count() -> int:
    """How many processes there are."""
    return distributed.get_world_size() if _several() else 1


def index() -> int:
    """The number of this one, from 0."""
    return distributed.get_rank() if _several() else 0


def mine(items: Sequence[T], each: bool = False) -> Sequence[T]:
    """This process's part of some work: every item is somebody's. `each`: nobody may go without."""
    if each and len(items) < count():
        raise HeadwiseError(
            f"{count()} processes cannot share {len(items)} batches of text; start {len(items)} or fewer, "
            "or raise --tokens."
        )
    return items[index() :: count()]


def wait() -> None:
    """Go on when all have come here."""
    if _several():
        distributed.barrier()


def by_first(action: Callable[[], T]) -> T | None:
    """Let the first process act, such as write a file; all go on when it is done. The others get nothing."""
    found = action() if index() == 0 else None
    wait()
    return found


def agrees(said: bool) -> bool:
    """What the first process says, in all of them: files may appear while the others look."""
    return bool(agreed(torch.tensor(said)))


def total(part: torch.Tensor) -> torch.Tensor:
    """The sum of every process's tensor, the same to the last bit in all of them."""
    if not _several():
        return part
    found = part.clone().contiguous()
    distributed.all_reduce(found)
    return found


def joined(rows: torch.Tensor) -> torch.Tensor:
    """Every process's rows, one after the other; they differ in number only."""
    if not _several():
        return rows
    sizes = torch.zeros(count(), dtype=torch.int64, device=rows.device)
    sizes[index()] = len(rows)
    sizes = total(sizes)
    found = rows.new_zeros((int(sizes.sum()), *rows.shape[1:]))
    start = int(sizes[: index()].sum())
    found[start : start + len(rows)] = rows
    return total(found)


def agreed(tensor: torch.Tensor) -> torch.Tensor:
    """The first process's tensor, in all of them: of the same shape everywhere."""
    if not _several():
        return tensor
    found = tensor.clone().contiguous()
    distributed.broadcast(found, 0)
    return found


def agreed_text(text: str) -> str:
    """The first process's text, in all of them."""
    if not _several():
        return text
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8)
    size = agreed(torch.tensor(len(raw)))
    buffer = raw if index() == 0 else torch.zeros(int(size), dtype=torch.uint8)
    return bytes(agreed(buffer).tolist()).decode()
