"""Tries how products with packed weights are cut into programs on a GPU: the table of `headwise.fast.packed_cuts`.

    python benchmarks/packed_tune.py --out tune.json

Every cut is built and checked first, in several processes that share Triton's cache. Then each is timed with several
copies of its matrix, used in turn, beside PyTorch's product with bfloat16. Printed for each number of bits and of rows:
the cut that is quickest on the whole, and PyTorch's time over its own for every shape of matrix.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from packed_cuda import COUNTS, GROUP, ROUNDS, SHAPES, copies, side_by_side, timing
from torch.nn.functional import linear

from headwise.fast import packed_rows
from headwise.fast.packed_cuts import Cut, cut_of, layout_of
from headwise.files.disk import write_atomically
from headwise.runtime.packed_headwise import unpacked

BITS = (2, 3, 4, 5, 6, 8)
TRIED = 256  # rows of the matrix with which a cut is checked
OFF = 1e-2  # by which bfloat16 may be


@dataclass(frozen=True)
class Case:
    """A cut of a product of so many rows with a matrix in so many bits."""

    bits: int
    count: int
    cut: Cut


def cuts(bits: int, count: int) -> list[Cut]:
    """What is tried: with tensor cores, and for a single row also without. Blocks fill rows of 2,048 columns whole."""
    layout = layout_of(bits, 4096, 4096 // GROUP)
    periods = max(16, 512 // layout.EACH)  # the block that fills shared memory well
    found = [cut_of(layout, count, 4096, 4096, False)]
    if count == 1:
        found += [
            Cut(0, rows, wide, warps, stages)
            for rows in (4, 8, 16)
            for wide, warps in ((64, 2), (128, 4))
            for stages in (1, 2, 4)
        ]
    for slices, rows, wide in ((4, 16, 1), (4, 32, 1), (4, 32, 2), (4, 64, 2), (2, 16, 1), (2, 32, 1), (8, 16, 1)):
        found += [Cut(slices, rows, max(16, periods // 2 // wide), slices, stages) for stages in (1, 2, 3, 4)]
    whole = [cut for cut in found if 2048 % (max(1, cut.S) * cut.BP * layout.EACH) == 0]
    return list(dict.fromkeys(whole))


def packed(rows: int, columns: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words and scales."""
    words = torch.randint(-(2**31), 2**31 - 1, (rows, columns * bits // 32), dtype=torch.int32, device="cuda")
    return words, (torch.rand(rows, columns // GROUP, device="cuda") * 0.08 / 2**bits).bfloat16()


@torch.no_grad()
def checked(case: Case) -> Case | None:
    """The case, if its kernel can be built and is right."""
    packed_rows.cut_of = lambda *given: case.cut
    words, scale = packed(TRIED, 4096, case.bits)
    x = torch.randn(case.count, 4096, device="cuda").bfloat16()
    want = linear(x.float(), unpacked(words, case.bits, 4096).float() * scale.float().repeat_interleave(GROUP, 1))
    try:
        found = packed_rows.few_times(x, words, scale, case.bits)
    except Exception as error:  # a cut that needs more shared memory than there is, among others
        print(f"{case}: {str(error)[-100:]}", flush=True)
        return None
    return case if (found.float() - want).norm() < OFF * want.norm() else None


@torch.no_grad()
def timed(shape: tuple[int, int], cases: list[Case]) -> list[dict[str, Any]]:
    """Every cut with matrices of a shape, and PyTorch's time beside it."""
    rows, columns = shape
    device = torch.device("cuda")
    plain = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(copies(2 * rows * columns))]
    found = []
    for bits in dict.fromkeys(case.bits for case in cases):
        held = [packed(rows, columns, bits) for _ in range(copies(rows * columns * bits // 8))]
        for case in (case for case in cases if case.bits == bits):
            packed_rows.cut_of = lambda *given, cut=case.cut: cut
            x = torch.randn(case.count, columns, device=device, dtype=torch.bfloat16)
            ways = {
                "ours": timing([partial(packed_rows.few_times, x, *one, bits) for one in held], device),
                "torch": timing([partial(linear, x, matrix) for matrix in plain], device),
            }
            times = {name: sorted(some)[ROUNDS // 2] for name, some in side_by_side(ways, ROUNDS).items()}
            found.append({"shape": shape, **asdict(case), **{f"{name}_us": us for name, us in times.items()}})
    return found


def told(rows: list[dict[str, Any]]) -> None:
    """Print the quickest cut of every number of bits and rows."""
    for bits, count in dict.fromkeys((row["bits"], row["count"]) for row in rows):
        some = [row for row in rows if (row["bits"], row["count"]) == (bits, count)]
        by_cut: dict[Cut, list[dict[str, Any]]] = {}
        for row in some:
            by_cut.setdefault(row["cut"], []).append(row)
        best = min(by_cut.values(), key=lambda found: sum(math.log(row["ours_us"]) for row in found))
        ratios = ", ".join(f"{row['torch_us'] / row['ours_us']:.2f}" for row in best)
        print(f"({bits}, {count}): {best[0]['cut']}  # {ratios}", flush=True)


def main() -> None:
    """Build, check, time, and write all times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="*", choices=BITS, default=BITS)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This needs a GPU.")
    every = [Case(bits, count, cut) for bits in asked.bits for count in COUNTS for cut in cuts(bits, count)]
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        right = [case for case in pool.imap(checked, every) if case is not None]
    print(f"{len(right)} of {len(every)} cuts are right", flush=True)
    rows = [row for shape in SHAPES[:3] for row in timed(shape, right)]
    write_atomically(asked.out, json.dumps(rows, indent=1) + "\n")
    told(rows)


if __name__ == "__main__":
    main()
