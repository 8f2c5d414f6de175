"""How rows of codes lie in the cache of a fast model, for kernels that read many places at once.

A code of 1 to 8 bits has a field of 2, 4 or 8 bits here, one of up to 12 bits has two fields: few kinds of fields are
read fastest. Fields lie in words of 16 bits so that one mask gives numbers of two of them: what is left of a word, read
as a number of 16 bits, is the field times a power of two, exactly. A segment is up to 64 coefficients that have a field
of one size and share a scale; word j of a chunk holds coefficient j of several segments, whose fields fill the word.
Coefficients that are missing from a segment have a factor of zero. Scales of keys lie in pairs of segments, those of
values in pairs of places: as they are multiplied, two at once. Needs torch alone.
"""

from typing import Any, NamedTuple

import torch

from headwise.runtime.coder_headwise import _span

SCALE_UP = 16.0  # of scales as kernels read them: rows of small numbers keep their precision
TILE = 64  # places whose scales, and whose values of a coefficient, lie side by side
FIELDS = {2: (2,), 4: (4,), 8: (8,), 12: (8, 4)}  # bits of a code, at most -> bits of its fields, highest first
WORD = 16  # bits
SEGMENTS = (16, 32, 64)  # coefficients of a segment: large ones are read fastest, small ones are filled up least
FILLED = 1.5  # times the fewest bytes, at most, for a larger segment


class Segment(NamedTuple):
    """Coefficients with a field of one size and one scale."""

    plane: int  # bits of a field
    place: int  # bits of a word below it
    group: int  # of the scale
    own: tuple[int, ...]  # coefficients


EMPTY = Segment(0, 0, 0, ())


def _room(bits: int) -> int:
    """Bits that all fields of a code have together."""
    return min(room for room in FIELDS if room >= bits)


def at(place: int) -> tuple[int, int]:
    """How a field is read: bits that a word moves down before the mask, and bits below the field after that."""
    return place // 8 * 8, place % 8


class CodeLayout:
    """Where the codes of a coder lie, and what their fields stand for."""

    def __init__(self, coder: Any) -> None:
        self.coder, self.size, self.kept, self.groups = coder, coder.size, coder.kept, coder.groups
        self.each = max(1, -(-coder.kept // coder.groups))  # coefficients of a scale
        self.bits = [bits for bits, count in coder.parts for _ in range(count)]
        self.fine_bits = coder.fine.parts[0][0]  # of every number of a near token
        built = {size: self._built(size) for size in SEGMENTS}
        bytes_of = {n: 2 * sum(n + len(chunk) + len(chunk) % 2 for chunk in chunks) for n, chunks in built.items()}
        self.segment = max(n for n in SEGMENTS if bytes_of[n] <= FILLED * min(bytes_of.values()))
        chunks = built[self.segment]
        self.plan = " ".join("".join(str(one.plane) for one in chunk) for chunk in chunks)  # fields of every chunk
        even = [chunk + [EMPTY] * (len(chunk) % 2) for chunk in chunks]  # scales are read in pairs
        self.firsts = [sum(map(len, even[:i])) for i in range(len(even))]  # segments before every chunk
        self.chunks, self.segments = len(chunks), [one for chunk in even for one in chunk]
        self.words, self.pairs = self.chunks * self.segment, len(self.segments) // 2  # of a place; of scales
        self.slots = len(self.segments) * self.segment
        self._made: dict[torch.device, dict[str, torch.Tensor]] = {}

    def _built(self, size: int) -> list[list[Segment]]:
        """The segments of all chunks, if a segment has so many coefficients: chunks have about as many each."""
        found = [one for plane in (8, 4, 2) for one in self._segments(plane, size)]
        chunks: list[list[Segment]] = [[] for _ in range(-(-sum(plane for plane, *_ in found) // WORD))]
        used = [0] * len(chunks)
        for one in found:  # largest first, each into the emptiest chunk: so it always fits
            i = used.index(min(used))
            chunks[i].append(one._replace(place=used[i]))
            used[i] += one.plane
        return chunks

    def _segments(self, plane: int, size: int) -> list[Segment]:
        found = []
        for group in range(self.groups):
            those = range(group * self.each, min((group + 1) * self.each, self.kept))
            own = [k for k in those if plane in FIELDS[_room(self.bits[k])]]
            found += [Segment(plane, 0, group, tuple(own[i : i + size])) for i in range(0, len(own), size)]
        return found

    def tables(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What kernels look up, by name."""
        if device not in self._made:
            made = {name: torch.tensor(rows, device=device) for name, rows in self._lists().items()}
            self._made[device] = {name: x.int() if not x.is_floating_point() else x.float() for name, x in made.items()}
        return self._made[device]

    def _lists(self) -> dict[str, list[Any]]:
        """By slot: `own` its coefficient, `bits` of its code (0: none), `raised` what is added to the code so that the
        middle of all codes is that of its fields, `below` bits below its field, `mult` what the field as the kernels
        read it is multiplied by. By segment: `group`, `plane`, `place`. By chunk: `first` segment, and one more. By
        coefficient: up to two `slots`, -1 where there are none."""
        made: dict[str, list[Any]] = {name: [] for name in ("own", "bits", "raised", "below", "mult")}
        slots: list[list[int]] = [[] for _ in range(max(1, self.size))]
        for number, (plane, place, _, those) in enumerate(self.segments):
            for j in range(self.segment):
                k = those[j] if j < len(those) else -1
                width = self.bits[k] if k >= 0 else 0
                room = _room(width)
                low = 4 if room > 8 and plane == 8 else 0
                if k >= 0:
                    slots[k].append(number * self.segment + j)
                step = 2.0 / (1 << width) * _span(width) * 2.0 ** (low - at(place)[1]) if k >= 0 else 0.0
                raised = (1 << room >> 1) - (1 << width >> 1)
                for name, x in zip(made, (max(k, 0), width, raised, low, step), strict=True):
                    made[name].append(x)
        return made | {
            "slots": [(each + [-1] * 2)[:2] for each in slots], "first": [*self.firsts, len(self.segments)],
            "group": [x.group for x in self.segments], "plane": [x.plane for x in self.segments],
            "place": [x.place for x in self.segments],
        }  # fmt: skip

    def read(self, words_BGN: torch.Tensor, scales_BGN: torch.Tensor, by_place: bool) -> torch.Tensor:
        """What codes stand for (B, G, L, K), in float32: plain code, for prompts that come in parts and for tests."""
        B, G = words_BGN.shape[:2]
        tables = self.tables(words_BGN.device)
        L = scales_BGN.shape[2] // max(1, self.pairs)
        found = torch.zeros(B, G, L, max(1, self.size), device=words_BGN.device)
        if not self.chunks:
            return found
        tiles = (B, G, L // TILE, -1, TILE)
        halves = scales_BGN.view(torch.float16)
        if by_place:
            words = words_BGN.view(B, G, L, self.words)
            halves = halves.view(*tiles, 2)
        else:
            words = words_BGN.view(tiles).transpose(3, 4).reshape(B, G, L, self.words)
            halves = halves.view(tiles)
        factor = halves.transpose(3, 4).reshape(B, G, L, -1).float() / SCALE_UP
        for number, (plane, place, _, _) in enumerate(self.segments):
            slots = slice(number * self.segment, (number + 1) * self.segment)
            chunk = sum(first <= number for first in self.firsts) - 1
            field = words[..., chunk * self.segment : (chunk + 1) * self.segment].int() >> place & ((1 << plane) - 1)
            steps = tables["mult"][slots] * 2.0 ** at(place)[1]
            numbers = (field - ((1 << plane) - 1) / 2) * steps * factor[..., number, None]
            found.index_add_(3, tables["own"][slots], numbers)
        return found
