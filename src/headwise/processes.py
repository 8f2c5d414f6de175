"""Several processes that share one run, as torchrun starts them: their number, their parts of the work, their sums.
At the end, work that threads of one process share.

    torchrun --nproc-per-node 4 -m headwise run MODEL --budget kv=75% --out runs/x

Every process holds both models and reads its own part of the text. Only the main process, number 0, writes files, into
a folder that all processes see. With a single process, the common case, every function returns its argument.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from headwise import devices
from headwise.errors import HeadwiseError

T = TypeVar("T")
R = TypeVar("R")
THREADED = 128  # columns of matrices from which on several are decomposed side by side
PATIENCE = timedelta(hours=12)  # the other processes wait while the main process reads, writes or verifies


def begin(device: str) -> str:
    """Join the processes that were started with this one, if that is not done yet; returns this process's device."""
    device = devices.chosen(device)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and distributed.is_available() and not distributed.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    return device


def _joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def count() -> int:
    """The number of processes."""
    return distributed.get_world_size() if _joined() else 1


def index() -> int:
    """The number of this process; 0 is the main process."""
    return distributed.get_rank() if _joined() else 0


def mine(items: Sequence[T], each: bool = False) -> Sequence[T]:
    """This process's part of some work. `each`: refuse fewer items than processes."""
    if each and len(items) < count():
        raise HeadwiseError(
            f"{count()} processes cannot share {len(items)} batches of text; start {len(items)} or fewer, "
            "or raise --tokens."
        )
    return items[index() :: count()]


def batch_tokens(most: int, places: int) -> int:
    """Tokens of a batch, so that every process has one; equal for one process and two, whose sums then are equal."""
    return min(most, places // max(2, count()))


def wait() -> None:
    """Return when all processes have called this."""
    if count() > 1:
        distributed.barrier()


def by_first(action: Callable[[], T]) -> T | None:
    """Let the main process do something, such as write a file, while the others wait. They get None."""
    found = action() if index() == 0 else None
    wait()
    return found


def agrees(said: bool) -> bool:
    """The main process's answer, in all processes: a file may appear between the moments at which two look for it."""
    return bool(agreed(torch.tensor(said)))


def total(part: torch.Tensor) -> torch.Tensor:
    """The sum of every process's tensor, equal to the last bit in all processes."""
    if count() == 1:
        return part
    found = part.clone().contiguous()
    distributed.all_reduce(found)
    return found


def joined(rows: torch.Tensor) -> torch.Tensor:
    """Every process's rows, one after the other. Only the number of rows may differ between processes."""
    if count() == 1:
        return rows
    sizes = torch.zeros(count(), dtype=torch.int64, device=rows.device)
    sizes[index()] = len(rows)
    sizes = total(sizes)
    found = rows.new_zeros((int(sizes.sum()), *rows.shape[1:]))
    start = int(sizes[: index()].sum())
    found[start : start + len(rows)] = rows
    return total(found)


def agreed(tensor: torch.Tensor) -> torch.Tensor:
    """The main process's tensor, in all processes; its shape must be the same everywhere."""
    if count() == 1:
        return tensor
    found = tensor.clone().contiguous()
    distributed.broadcast(found, 0)
    return found


def agreed_text(text: str) -> str:
    """The main process's text, in all processes."""
    found = [text]
    if count() > 1:
        distributed.broadcast_object_list(found)
    return found[0]


def side_by_side(work: Callable[[T], R], items: Sequence[T], width: int) -> list[R]:
    """`work` on every item, in their order: decompositions of matrices of about this width, one thread for each.

    One after the other with all threads takes longer, as such decompositions hardly use them. Small matrices are not
    worth threads.
    """
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    if min(threads, len(items)) < 2 or width < THREADED:
        return [work(item) for item in items]

    def alike(item: T) -> R:
        with torch.set_grad_enabled(gradients):  # which every thread has for itself
            return work(item)

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(alike, items))
    finally:
        torch.set_num_threads(threads)  # some libraries have one number for all threads
