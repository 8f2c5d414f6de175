"""How coded rows lie in a fast cache: the codes of RowCoder, packed so that a GPU unpacks them in few steps.

A row is a list of words of 16 bits. Up to 64 neighbouring words form a block; its words have the same fields, for
example 6, 6 and 4 bits. One field of all words of a block is a column: up to 64 coefficients that a GPU unpacks
together and takes as one operand of its tensor cores. Which coefficient lies where is chosen once: the few bits left
beside wide fields hold narrow codes, a code may lie in a wider field, and a column holds coefficients of as few groups
(those that share a scale) as possible. Codes and scales are RowCoder's own, so both forms say exactly the same numbers;
rows are rounded up to 16 or 8 bytes.
Scales lie apart, those of 64 places and a group side by side: (B, G, L / 64, groups, 64).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from headwise.runtime.cache_headwise import RowCoder, _span, _unpacked

WORD = 16  # bits
ROWS = 64  # words of a block, at most: what one step of the tensor cores takes
STEPS = (8, 4)  # rows are multiples of so many words: 16 bytes, which a GPU reads at once, or 8 where that saves
WIDEST = 8  # bits of a code
FRACTION = 10  # bits of a number of 16 bits below its leading one
MORE = 1.02  # times the bytes of RowCoder: where rows of 16 bytes need more, they are of 8
GAP = 0.15  # columns more than the fewest that there can be: a search for the very fewest takes minutes
NODES = 200  # of a search, at most: not seconds, so that all machines find the same
TRIED = 3  # ways to cut a row into blocks, of those that hold a code


@dataclass(frozen=True)
class Field:
    """Bits of a word, and how they become a number of 16 bits without any conversion.

    A word is shifted and all other bits are masked out. Read as a number of 16 bits, what is left is so small that it
    has no leading one: it is code * 2**(place - 24), exactly, and the tensor cores multiply such numbers as all others.
    """

    start: int
    bits: int
    shift: int  # to the right
    place: int  # of the lowest bit after the shift

    @property
    def mask(self) -> int:
        """The bits of the field after the shift."""
        return ((1 << self.bits) - 1) << self.place

    @property
    def middle(self) -> float:
        """The code that stands for zero."""
        return ((1 << self.bits) - 1) / 2


def fields(widths: tuple[int, ...]) -> tuple[Field, ...]:
    """Fields of a word, from its lowest bits on; neighbours share a shift where ten bits hold them."""
    made, start, base = [], 0, 0
    for bits in widths:
        if start - base + bits > FRACTION:
            base = start
        made.append(Field(start, bits, base, start - base))
        start += bits
    return tuple(made)


@dataclass(frozen=True)
class Block:
    """Words with the same fields."""

    offset: int  # of the first word in a row
    words: int
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Column:
    """One field of a block's words: which coefficients they hold (-1: none)."""

    block: int
    field: Field
    coefficients: tuple[int, ...]


class Packing:
    """Where the coefficients of a RowCoder lie."""

    def __init__(self, coder: RowCoder) -> None:
        self.coder, self.size, self.groups = coder, coder.size, coder.groups
        self.group_size = -(-coder.size // coder.groups)
        self.bits = [bits for bits, count in coder.parts for _ in range(count)]
        self.blocks = _blocks(coder)
        self.words = sum(block.words for block in self.blocks)
        self.bytes = 2 * self.words + self.groups
        self.columns = tuple(self._columns())

    def group(self, coefficient: int) -> int:
        """Which scale is that of a coefficient."""
        return coefficient // self.group_size

    def _columns(self) -> Iterator[Column]:
        """Wide codes to wide fields; among fields of equal width, coefficients of a group stay together."""
        every = [(at, field) for at, block in enumerate(self.blocks) for field in block.fields]
        held: dict[Any, list[int]] = {}
        first = 0
        for bits in sorted({field.bits for _, field in every}, reverse=True):
            alike = [one for one in every if one[1].bits == bits]
            room = sum(self.blocks[at].words for at, _ in alike)
            held |= self._dealt(alike, range(first, min(first + room, self.size)))
            first = min(first + room, self.size)
        assert first == self.size
        for one in every:
            yield Column(*one, tuple(held[one]))

    def _dealt(self, alike: list[Any], coefficients: range) -> dict[Any, list[int]]:
        """Coefficients in columns: a group that fills one comes first, then the largest rests."""
        rests: dict[int, list[int]] = {}
        for coefficient in coefficients:
            rests.setdefault(self.group(coefficient), []).append(coefficient)
        dealt = {}
        for at, field in sorted(alike, key=lambda one: -self.blocks[one[0]].words):
            words = self.blocks[at].words
            row: list[int] = []
            while len(row) < words and rests:
                largest = max(rests, key=lambda group: len(rests[group]))
                take = words - len(row)
                row += rests[largest][:take]
                rests[largest] = rests[largest][take:]
                if not rests[largest]:
                    del rests[largest]
            dealt[at, field] = row + [-1] * (words - len(row))
        return dealt

    def step(self, coefficient: int) -> float:
        """What one step of a coefficient's code stands for, before its scale."""
        return 2.0 / (1 << self.bits[coefficient]) * _span(self.bits[coefficient])

    def raised(self, coefficient: int, field: Field) -> int:
        """What is added to a code in a wider field, so that the middle stays the middle."""
        return ((1 << field.bits) - (1 << self.bits[coefficient])) // 2

    @functools.cached_property
    def places(self) -> np.ndarray[Any, Any]:
        """Where each coefficient lies: its column times 64 and its word in the block."""
        found = np.zeros(self.size, dtype=np.int32)
        for at, column in enumerate(self.columns):
            for word, coefficient in enumerate(column.coefficients):
                if coefficient >= 0:
                    found[coefficient] = at * ROWS + word
        return found


@functools.cache
def packing(counts: tuple[tuple[str, int], ...]) -> Packing:
    """The packing of a code by its counts, `tuple(counts.items())`; found once."""
    return Packing(RowCoder(dict(counts), sum(count for _, count in counts)))


@functools.cache
def _words() -> tuple[tuple[int, ...], ...]:
    """All ways to fill a word with fields, widest first."""

    def rest(left: int, widest: int) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for bits in range(min(left, widest), 0, -1):
            for more in rest(left - bits, bits):
                yield bits, *more

    return tuple(rest(WORD, WIDEST))


def _blocks(coder: RowCoder) -> tuple[Block, ...]:
    """Blocks that hold a code in as few bytes as possible, and then in as few columns."""
    least, spare = -(-coder.bits // WORD), int(MORE * coder.bytes - coder.groups) // 2
    step = STEPS[0] if -(-least // STEPS[0]) * STEPS[0] <= spare else STEPS[1]
    words = -(-least // step) * step
    while not (found := list(islice(filter(None, (_fewest(coder, sizes) for sizes in _sizes(words))), TRIED))):
        words += step
    made, offset = [], 0
    for count, widths in min(found, key=lambda one: sum(len(widths) for _, widths in one)):
        made.append(Block(offset, count, fields(widths)))
        offset += count
    return tuple(made)


def _sizes(words: int) -> Iterator[list[int]]:
    """Ways to cut a row into blocks: long ones, and up to three shorter ones for what is left."""
    most = (words - 1) // ROWS
    for full in range(most, max(-1, most - 2), -1):
        for others in range(3):
            for some in combinations_with_replacement(range(ROWS - 16, 0, -16), others):
                last = words - ROWS * full - sum(some)
                if 0 < last <= ROWS:
                    yield [ROWS] * full + sorted((*some, last), reverse=True)


def _fewest(coder: RowCoder, sizes: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Fields of blocks of given sizes; empty if none hold the code.

    A field holds every code that is not wider. So it is enough to count: fields of at least so many bits against codes
    of at least so many bits.
    """
    distinct = sorted(set(sizes), reverse=True)
    kinds = [(rows, kind) for rows in distinct for kind in _words()]
    widths = range(1, WIDEST + 1)
    room = np.array([[rows * sum(bits >= least for bits in kind) for rows, kind in kinds] for least in widths])
    wanted = np.array([sum(count for bits, count in coder.parts if bits >= least) for least in widths])
    among = np.array([[rows == size for rows, _ in kinds] for size in distinct])
    given = np.array([sizes.count(size) for size in distinct])
    limits = [LinearConstraint(room, wanted, np.inf), LinearConstraint(among, given, given)]
    cost, whole = np.array([len(kind) for _, kind in kinds]), np.ones(len(kinds))
    how = {"mip_rel_gap": GAP, "node_limit": NODES}
    found = milp(cost, constraints=limits, integrality=whole, bounds=Bounds(0, np.inf), options=how)
    if found.x is None:
        return []
    counts = np.rint(found.x).astype(int)
    return [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]


def repacked(packed: Packing, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a RowCoder (..., L, bytes) as words (..., L, words) and scales (..., L / 64, groups, 64)."""
    coder = packed.coder
    scales = rows.narrow(-1, coder.codes, coder.groups).unflatten(-2, (-1, ROWS))
    return _joined(packed, _codes(coder, rows)), scales.transpose(-1, -2).contiguous()


def _codes(coder: RowCoder, rows: torch.Tensor) -> torch.Tensor:
    """The code of every coefficient."""
    codes: list[Any] = [0] * len(coder.parts)
    for plane, start, count in coder.planes:
        end = -(-(start + count * plane) // 8)
        found, at = _unpacked(rows[..., start // 8 : end], plane), start % 8 // plane
        for number, (bits, size) in enumerate(coder.parts):
            if bits & plane:
                codes[number] = codes[number] << plane | found.narrow(-1, at, size)
                at += size
    return torch.cat(codes, -1)


def _joined(packed: Packing, codes: torch.Tensor) -> torch.Tensor:
    words = torch.zeros((*codes.shape[:-1], packed.words), dtype=torch.int32, device=codes.device)
    for column in packed.columns:
        block = packed.blocks[column.block]
        held = [(word, one) for word, one in enumerate(column.coefficients) if one >= 0]
        if not held:
            continue
        at = torch.tensor([block.offset + word for word, _ in held], device=codes.device)
        taken = codes[..., [one for _, one in held]].int()
        more = torch.tensor([packed.raised(one, column.field) for _, one in held], device=codes.device)
        words.index_add_(-1, at, (taken + more.int()) << column.field.start)
    return (words - ((words >= 1 << 15).int() << 16)).short()
