"""How rows of codes lie in the cache of a fast model, for kernels that read many places at once.

Codes of 1 to 12 bits are stored here in planes of 8, 4, 2 and 1 bits; fields of a plane lie in words of
16 bits so that one mask gives numbers of two of them: what is left of a word, read as a number of 16 bits, is the field
times a power of two, exactly. A segment is up to 64 coefficients that have a field in a plane and share a scale;
word j of a chunk holds coefficient j of as many segments as a word has fields. Coefficients that are missing from a
segment have a factor of zero. Needs torch alone.
"""

from typing import Any, NamedTuple

import torch

from headwise.runtime.coder_headwise import _span

SCALE_UP = 16.0  # of scales as kernels read them: rows of small numbers keep their precision
TILE = 64  # places whose scales, and whose values of a coefficient, lie side by side
PLANES = (8, 4, 2, 1)
SEGMENTS = (16, 32, 64)  # coefficients of a segment: large ones are read fastest, small ones are filled up least
FILLED = 1.5  # times the fewest bytes, at most, for a larger segment


class Segment(NamedTuple):
    """Coefficients with a field in a plane and one scale."""

    plane: int  # bits of a field
    group: int  # of the scale
    own: tuple[int, ...]  # coefficients


def at(plane: int, field: int) -> tuple[int, int]:
    """Where a field of a word lies: bits that it moves down before the mask, and bits below it after that."""
    low = 10 // plane  # fields among the lowest 10 bits, which are a number's fraction
    return field // low * low * plane, field % low * plane


class CodeLayout:
    """Where the codes of a coder lie, and what their fields stand for."""

    def __init__(self, coder: Any) -> None:
        self.coder, self.size, self.kept, self.groups = coder, coder.size, coder.kept, coder.groups
        self.each = max(1, -(-coder.kept // coder.groups))  # coefficients of a scale
        self.bits = [bits for bits, count in coder.parts for _ in range(count)]
        self.fine_bits = coder.fine.parts[0][0]  # of every number of a near token
        built = {size: self._built(size) for size in SEGMENTS}
        bytes_of = {n: 2 * (n * sum(chunks) + len(segments)) for n, (chunks, segments) in built.items()}
        self.segment = max(n for n in SEGMENTS if bytes_of[n] <= FILLED * min(bytes_of.values()))
        self.chunks, self.segments = built[self.segment]  # chunks: of every plane
        self.words = sum(self.chunks) * self.segment  # of a place
        self.slots = len(self.segments) * self.segment
        self._made: dict[torch.device, dict[str, torch.Tensor]] = {}

    def _built(self, size: int) -> tuple[list[int], list[Segment]]:
        """Chunks by plane, and all segments, if a segment has so many coefficients."""
        chunks, segments = [], []
        for plane in PLANES:
            found, fields = self._segments(plane, size), 16 // plane
            found += [Segment(plane, 0, ())] * (-len(found) % fields)
            chunks.append(len(found) // fields)
            segments += found
        return chunks, segments

    def _segments(self, plane: int, size: int) -> list[Segment]:
        found = []
        for group in range(self.groups):
            those = range(group * self.each, min((group + 1) * self.each, self.kept))
            own = [k for k in those if self.bits[k] & plane]
            found += [Segment(plane, group, tuple(own[i : i + size])) for i in range(0, len(own), size)]
        return found

    def tables(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What kernels look up, by name."""
        if device not in self._made:
            made = {name: torch.tensor(rows, device=device) for name, rows in self._lists().items()}
            self._made[device] = {name: x.int() if not x.is_floating_point() else x.float() for name, x in made.items()}
        return self._made[device]

    def _lists(self) -> dict[str, list[Any]]:
        """By slot: `own` its coefficient, `bits` all bits of its code, `below` those below its field, `mult` what the
        field as the kernels read it is multiplied by. By segment: `group`, `plane`. By chunk: `first` segment. By
        coefficient: up to three `slots`, -1 where there are none."""
        own: list[int] = []
        bits, below, mult = list[int](), list[int](), list[float]()
        slots: list[list[int]] = [[] for _ in range(max(1, self.size))]
        firsts, first = [], 0
        for plane, chunks in zip(PLANES, self.chunks, strict=True):
            firsts += [first + i * (16 // plane) for i in range(chunks)]
            first += chunks * (16 // plane)
        beginning = dict.fromkeys(PLANES, -1)
        for number, (plane, _, those) in enumerate(self.segments):
            beginning[plane] = number if beginning[plane] < 0 else beginning[plane]
            place = at(plane, (number - beginning[plane]) % (16 // plane))[1]
            for j in range(self.segment):
                k = those[j] if j < len(those) else -1
                width = self.bits[k] if k >= 0 else 1
                low = width & (plane - 1)
                step = 2.0 / (1 << width) * _span(width)
                if k >= 0:
                    slots[k].append(len(own))
                own.append(max(k, 0))
                bits.append(width if k >= 0 else 0)
                below.append(low)
                mult.append(step * 2.0 ** (low - place) if k >= 0 else 0.0)
        three = [(each + [-1] * 3)[:3] for each in slots]
        return {
            "own": own, "bits": bits, "below": below, "mult": mult, "slots": three, "first": firsts,
            "group": [x.group for x in self.segments], "plane": [x.plane for x in self.segments],
        }  # fmt: skip

    def read(self, words_BGN: torch.Tensor, scales_BGN: torch.Tensor, by_place: bool) -> torch.Tensor:
        """What codes stand for (B, G, L, K), in float32: plain code, for prompts that come in parts and for tests."""
        B, G = words_BGN.shape[:2]
        chunks, tables = sum(self.chunks), self.tables(words_BGN.device)
        L = scales_BGN.shape[2] * 2 // max(2, len(self.segments))
        found = torch.zeros(B, G, L, max(1, self.size), device=words_BGN.device)
        if not chunks:
            return found
        if by_place:
            words = words_BGN.view(B, G, L, chunks * self.segment)
        else:
            tiles = words_BGN.view(B, G, L // TILE, chunks * self.segment, TILE)
            words = tiles.transpose(3, 4).reshape(B, G, L, chunks * self.segment)
        halves = scales_BGN.view(torch.float16).view(B, G, L // TILE, -1, TILE, 2)
        factor = halves.transpose(3, 4).reshape(B, G, L, -1).float() / SCALE_UP
        for number, first in enumerate(tables["first"].tolist()):
            plane = self.segments[first].plane
            those = words[..., number * self.segment : (number + 1) * self.segment].int()
            for f in range(16 // plane):
                slots = slice((first + f) * self.segment, (first + f + 1) * self.segment)
                field = (those >> (f * plane)) & ((1 << plane) - 1)
                steps = tables["mult"][slots] * 2.0 ** at(plane, f)[1]
                numbers = (field - ((1 << plane) - 1) / 2) * steps * factor[..., first + f, None]
                found.index_add_(3, tables["own"][slots], numbers)
        return found
