"""How packed matrices lie in words, and how products with them are cut into programs on CUDA."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple


class Periods(NamedTuple):
    """How the numbers of a matrix lie in its words, as kernels take it."""

    BITS: int
    EACH: int  # numbers of a period
    WORDS: int  # words of a period
    GROUP: int  # numbers that share a scale


class Cut(NamedTuple):
    """How a product is cut: a program has BN rows of a matrix, and at once BP periods of each of S slices of them."""

    S: int  # 0 without tensor cores
    BN: int
    BP: int
    warps: int
    stages: int  # blocks under way


def layout_of(bits: int, columns: int, groups: int) -> Periods:
    """The layout of a matrix. A single scale for a row is one for all its periods, also where the last is not full."""
    words = bits // gcd(bits, 32)
    each = 32 * words // bits
    return Periods(bits, each, words, columns // groups if groups > 1 else -(-columns // each) * each)


CUTS = {  # by bits and the most rows: the quickest on an H200 (benchmarks/packed_tune.py tries others)
    (2, 1): Cut(0, 8, 128, 4, 2),
    (2, 4): Cut(4, 32, 16, 4, 3),
    (2, 16): Cut(4, 32, 16, 4, 3),
    (3, 1): Cut(0, 8, 64, 2, 2),
    (3, 4): Cut(4, 16, 16, 4, 1),
    (3, 16): Cut(4, 16, 16, 4, 1),
    (4, 1): Cut(4, 16, 32, 4, 3),
    (4, 4): Cut(4, 16, 32, 4, 3),
    (4, 16): Cut(4, 32, 32, 4, 3),
    (8, 1): Cut(4, 16, 64, 4, 3),
    (8, 4): Cut(4, 16, 64, 4, 3),
    (8, 16): Cut(4, 32, 32, 4, 4),
}


def cut_of(layout: Periods, count: int, rows: int, columns: int, exact: bool) -> Cut:
    """How `count` rows times a matrix are cut; `exact` is for float32, of which there is a single row.

    Blocks that fill a row whole are read without looking at its end.
    """
    most = next(n for n in (1, 4, 16) if count <= n)
    if exact or (count == 1 and (layout.BITS, 1) not in CUTS):
        return Cut(0, 8, 64, 2, 1) if layout.EACH == 32 else Cut(0, 8 if rows > 4096 else 4, 128, 4, 2)
    usual = Cut(4, 32 if count > 4 else 16, {4: 64, 8: 32, 16: 16, 32: 16}[layout.EACH], 4, 2)
    cut = CUTS.get((layout.BITS, most), usual)
    while cut.S and cut.BP > 16 and columns % (layout.EACH * cut.BP * cut.S):
        cut = cut._replace(BP=cut.BP // 2)
    return cut
