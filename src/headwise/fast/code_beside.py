"""What belongs to decode attention over rows in bits beside the two large kernels, and the call of all.

Queries as those kernels take them; the tokens of a text that are not coded, which are its first and its newest; and the
sum of what all parts found. Imported only where Triton is.
Shape suffixes: B texts, H query heads, G rows per token, K and V coefficients, S splits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from headwise.fast.code_decode import PLAIN, SMALL, TILES, CodeTile, _scores
from headwise.fast.code_layout import SCALE_UP, TILE, CodeLayout
from headwise.fast.code_sums import _sums, sum_jobs
from headwise.fast.flash_decode import _capped

HEADS = 32  # query heads of a program, at most: more share a row by reading it again
EACH = 8  # query heads that one program makes ready: they lie side by side
BESIDE = 16  # tokens that are not coded, in one program
FEW = 2048  # outputs of a multiprocessor: where there are more, a program combines more of them
OFF = 0.01  # of the norm: by so much two ways to build kernels may differ
TURNS = 4  # in which these are timed
COUNTS = ["S", "P"]


@triton.jit
def _queries(
    q, own, mult, out, units, scaling, q_row, q_head, G: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Queries of some heads by slots, times the steps of their codes, in 16 bits; and what makes scores of products."""
    pair = (tl.program_id(0) // (M // EACH)).to(tl.int64)
    m = tl.program_id(0) % (M // EACH) * EACH + tl.arange(0, EACH)
    head = pair % PARTS * M + m
    i = tl.arange(0, BLOCK)
    there = i < SLOTS
    k = tl.load(own + i, mask=there, other=0)
    heads = pair // (G * PARTS) * q_row + (pair // PARTS % G * SHARE + head) * q_head
    x = tl.load(q + heads[None, :] + k[:, None], mask=there[:, None] & (head < SHARE)[None, :], other=0.0)
    x = x.to(tl.float32) * tl.load(mult + i, mask=there, other=0.0)[:, None]
    power = 12.0 - tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x), 0), 1e-30)))
    cells = out + (pair * SLOTS + i)[:, None] * M + m[None, :]
    tl.store(cells, (x * tl.exp2(power)[None, :]).to(tl.float16), mask=there[:, None])
    tl.store(units + pair * M + m, scaling * tl.exp2(10.0 - power) / UP)


@triton.jit
def _beside(
    q, keys, values, part, top, lengths, starts, scaling, cap, q_row, q_head, G: tl.constexpr, SHARE: tl.constexpr,
    PARTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, R: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention to some of the first and newest tokens."""
    pair = tl.program_id(0).to(tl.int64)
    b = pair // (G * PARTS)
    slot = tl.program_id(1) * R + tl.arange(0, R)
    end = tl.load(lengths + b)
    start = tl.load(starts + b)
    near = end - 1 - (end - 1 - slot + WHOLE + NEAR) % NEAR  # the newest token that has this slot
    seen = tl.where(slot < WHOLE, start + slot < end, (near >= start + WHOLE) & (slot < WHOLE + NEAR))
    head = pair % PARTS * M + tl.arange(0, M)
    queries = q + b * q_row + (pair // PARTS % G * SHARE + head)[:, None] * q_head
    keys += pair // PARTS * (SIDE * K)
    values += pair // PARTS * (SIDE * V)
    d = tl.arange(0, BLOCK)
    s = tl.zeros([M, R], tl.float32)
    for low in range(0, K, BLOCK):
        x = tl.load(queries + low + d[None, :], mask=(head < SHARE)[:, None] & (low + d < K)[None, :], other=0.0)
        y = tl.load(keys + slot[:, None] * K + low + d[None, :], mask=seen[:, None] & (low + d < K)[None, :], other=0.0)
        s = tl.dot(x, tl.trans(y), s, input_precision=PRECISION)
    s = s * scaling
    if CAPPED:
        s = _capped(s, cap)
    s = tl.where(seen[None, :], s * 1.4426950408889634, float("-inf"))
    most = tl.max(s, 1)
    p = tl.exp2(s - tl.where(most == float("-inf"), 0.0, most)[:, None])
    total = tl.sum(p, 1)
    some = tl.where(total > 0, total, 1.0)
    target = (pair * tl.num_programs(1) + tl.program_id(1)) * M + tl.arange(0, M)
    tl.store(top + target, tl.where(total > 0, most + tl.log2(some), float("-inf")))
    p = p / some[:, None]
    for low in range(0, V, BLOCK):
        y = tl.load(
            values + slot[:, None] * V + low + d[None, :], mask=seen[:, None] & (low + d < V)[None, :], other=0.0
        )
        z = tl.dot(p.to(y.dtype), y, input_precision=PRECISION)
        tl.store(part + target[:, None] * V + low + d[None, :], z, mask=(low + d < V)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def _combine(
    part, part_tops, tops, sums, beside, beside_tops, slots, mult, out, S, P,
    PARTS: tl.constexpr, SHARE: tl.constexpr, SLOTS: tl.constexpr, UP: tl.constexpr,
    V: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, SUMS: tl.constexpr, SIDES: tl.constexpr,
    SIDES2: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Outputs of a head: `S` programs scored places, `P` others summed values."""
    row = tl.program_id(0).to(tl.int64)
    g, head = row // SHARE, row % SHARE
    pair, m = g * PARTS + head // M, head % M
    d = tl.program_id(1) * D + tl.arange(0, D)
    split, some, side = tl.arange(0, SPLITS), tl.arange(0, SUMS), tl.arange(0, SIDES2)
    scored = tl.load(tops + (pair * S + split) * M + m, mask=split < S, other=float("-inf"))
    x = tl.load(part_tops + (pair * P + some) * M + m, mask=some < P, other=float("-inf"))
    y = tl.load(beside_tops + (pair * SIDES + side) * M + m, mask=side < SIDES, other=float("-inf"))
    most = tl.maximum(tl.max(scored, 0), tl.max(y, 0))
    scored = tl.where(scored == float("-inf"), 0.0, tl.exp2(scored - most))
    x = tl.where(x == float("-inf"), 0.0, tl.exp2(x - most))
    y = tl.where(y == float("-inf"), 0.0, tl.exp2(y - most))
    total = tl.sum(y, 0) + tl.sum(scored * tl.load(sums + (pair * S + split) * M + m, mask=split < S, other=0.0), 0)
    there = (y > 0)[:, None] & (d < V)[None, :]
    z = tl.load(beside + ((pair * SIDES + side) * M + m)[:, None] * V + d[None, :], mask=there, other=0.0)
    z = tl.sum(z * y[:, None], 0)
    for i in tl.static_range(2):
        slot = tl.load(slots + d * 2 + i, mask=d < V, other=-1)
        there = (slot >= 0)[None, :] & (x > 0)[:, None]
        found = tl.load(part + ((pair * P + some) * M + m)[:, None] * SLOTS + slot[None, :], mask=there, other=0.0)
        unit = tl.load(mult + slot, mask=slot >= 0, other=0.0) * (1024.0 / UP)
        z += tl.sum(found * x[:, None], 0) * unit
    mixed = z / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V + d, mixed.to(out.dtype.element_ty), mask=d < V)


class CodeDecode:
    """Decode attention of one size over a cache of rows in bits."""

    def __init__(
        self, keys: CodeLayout, values: CodeLayout, whole: int, near: int, tile: CodeTile | None = None
    ) -> None:
        self.keys, self.values, self.whole, self.near, self.tile = keys, values, whole, near, tile
        self.failures: dict[CodeTile, str] = {}  # of ways that were tried here; empty where kernels were built

    def __call__(
        self, q_BHK: torch.Tensor, k: Any, v: Any, lengths_B: torch.Tensor, starts_B: torch.Tensor, scaling: float,
        softcap: float | None = None, write: Callable[[], None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The heads' outputs (B, H, V). Places `starts <= l < lengths` of a text are seen; `k` and `v`: `CodedSide`.

        `write` puts the newest row into the cache: while coded places are read, for it is not among them.
        """
        (B, H, _), G, V = q_BHK.shape, k.words.shape[1], self.values.size
        share = H // G
        M = max(16, min(HEADS, triton.next_power_of_2(share)))
        parts = -(-share // M)
        pairs, device = B * G * parts, q_BHK.device
        size = dict(GP=G * parts, PARTS=parts, M=M, TILE=TILE, WHOLE=self.whole, NEAR=self.near, PACKED=q_BHK.is_cuda)
        made = _Room(pairs, M, device)
        sides = -(-(self.whole + self.near) // BESIDE)
        beside, beside_tops = made(sides, V), made(sides)
        q16, units = self._ready(q_BHK, scaling, made, dict(G=G, SHARE=share, PARTS=parts, M=M))
        aside = _aside(device)
        with nullcontext() if aside is None else torch.cuda.stream(aside):
            if write is not None:
                write()
            _beside[(pairs, sides)](
                q_BHK, k.side, v.side, beside, beside_tops, lengths_B, starts_B, scaling, softcap or 1.0,
                q_BHK.stride(0), q_BHK.stride(1), G=G, SHARE=share, PARTS=parts, K=self.keys.size, V=V, M=M, R=BESIDE,
                SIDE=k.side.shape[2], BLOCK=128, WHOLE=self.whole, NEAR=self.near, CAPPED=softcap is not None,
                PRECISION="ieee" if q_BHK.dtype == torch.float32 else "tf32",
            )  # fmt: skip
        out = torch.empty(B, H, V, dtype=q_BHK.dtype, device=device)
        table = self.values.tables(device)

        def read(tile: CodeTile) -> torch.Tensor:
            found = self._coded(q16, units, k, v, lengths_B, starts_B, softcap, made, size, tile)
            S, P = found[2].shape[1], found[1].shape[1]
            if aside is not None:
                torch.cuda.current_stream(device).wait_stream(aside)
            D = 256 if B * H * V // made.processors >= FEW else 64
            _combine[(B * H, -(-V // D))](
                *found, beside, beside_tops, table["slots"], table["mult"], out, S, P, PARTS=parts, SHARE=share,
                SLOTS=self.values.slots, UP=SCALE_UP, V=V, M=M, SPLITS=triton.next_power_of_2(S),
                SUMS=triton.next_power_of_2(P), SIDES=sides, SIDES2=triton.next_power_of_2(sides), D=D,
            )  # fmt: skip
            return out

        size_of = (pairs, M, k.places, -(-len(self.keys.segments) // 8), device)  # layers of like size are built alike
        read(self.tile or _quickest(read, size_of, self.failures))
        return out

    def _ready(
        self, q_BHK: torch.Tensor, scaling: float, made: Any, size: dict[str, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries as the kernels take them, and what makes scores of products."""
        slots, own = self.keys.slots, self.keys.tables(q_BHK.device)
        q16, units = made(slots, dtype=torch.float16), made()
        _queries[(made.pairs * made.heads // EACH,)](
            q_BHK, own["own"], own["mult"], q16, units, scaling, q_BHK.stride(0), q_BHK.stride(1), SLOTS=slots,
            UP=SCALE_UP, BLOCK=triton.next_power_of_2(max(1, slots)), EACH=EACH, num_warps=8, **size,
        )  # fmt: skip
        return q16, units

    def _coded(
        self, q16: torch.Tensor, units: torch.Tensor, k: Any, v: Any, lengths: torch.Tensor, starts: torch.Tensor,
        softcap: float | None, made: Any, size: dict[str, Any], tile: CodeTile,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Of every part: sums over places by slots, the highest score. Of every split: that, the sum of weights."""
        L, keys = k.places, self.keys
        N = min(tile.places, L)
        weights, tops = made(L, dtype=torch.float16), made(L // N)
        S = max(1, min(made.processors * tile.programs // made.pairs, L // N))
        split_tops, split_sums = made(S), made(S)
        given = (q16, k.words, k.scales, weights, tops, split_tops, split_sums, units, lengths, starts, S, L)
        own = dict(PLAN=keys.plan, SEGMENTS=len(keys.segments), SEG=keys.segment, N=N, CAPPED=softcap is not None)
        own |= dict(num_warps=tile.warps)
        if tile.ahead and (ahead := _ahead(made.device, keys)):
            own |= {name: x for name, x in size.items() if name != "PACKED"}
            ring = ahead.fitting_ring(tile.ahead, keys.chunks)
            ahead._scores_ahead[(made.pairs, S)](*given, softcap or 1.0, RING=ring, **own)
        else:
            own |= dict(HELD=tile.held, num_stages=tile.stages)
            _scores[(made.pairs, S)](*given, softcap or 1.0, **own, **size)
        found = self._summed(weights, v, tops, lengths, starts, made, size | dict(N=N), tile)
        return *found, split_tops, split_sums

    def _summed(
        self, weights: torch.Tensor, v: Any, tops: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor,
        made: Any, size: dict[str, Any], tile: CodeTile,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Of every part: sums over places by slots, and the highest score."""
        L, values = v.places, self.values
        jobs = sum(job[1] for job in sum_jobs(values.plan, tile.fields))
        P = max(1, min(made.processors * tile.sum_programs // max(1, made.pairs * jobs), L // size["N"]))
        part, part_tops = made(P, values.slots), made(P)
        given = (weights, v.words, v.scales, tops, part, part_tops, lengths, starts, P, L)
        own = dict(PLAN=values.plan, MOST=tile.fields, SEGMENTS=len(values.segments), CHUNKS=values.chunks)
        own |= dict(SEG=values.segment, maxnreg=tile.sum_registers)
        if tile.sum_ahead and (ahead := _ahead(made.device, values)):
            own |= {name: x for name, x in size.items() if name != "PACKED"}
            ahead._sums_ahead[(jobs, P, made.pairs)](*given, DEPTH=tile.sum_ahead, **own)
        else:
            own |= dict(T=TILE, num_stages=tile.sum_stages)
            _sums[(jobs, P, made.pairs)](*given, **own, **size)
        return part, part_tops


def _ahead(device: torch.device, layout: CodeLayout) -> Any:
    """The module `code_ahead` where its kernels take such rows; otherwise nothing."""
    found = _gluon(device) if device.type == "cuda" and layout.chunks > 0 else None
    return found if found is not None and layout.segment == found.SEGMENT else None


@cache
def _gluon(device: torch.device) -> Any:
    """The module `code_ahead` where a device can run it and Triton has what it imports; otherwise nothing."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from headwise.fast import code_ahead
    except Exception:  # Gluon is experimental: other versions of Triton may lack it, or parts of it
        return None
    return code_ahead


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _aside(device: torch.device) -> torch.cuda.Stream | None:
    """Where kernels run beside others, after all that was begun so far; none but on CUDA."""
    if device.type != "cuda":
        return None
    _second(device).wait_stream(torch.cuda.current_stream(device))
    return _second(device)


_chosen: dict[Any, list[CodeTile]] = {}


def _quickest(work: Callable[[CodeTile], torch.Tensor], key: Any, failures: dict[CodeTile, str]) -> CodeTile:
    """The quickest way to build kernels for a size, measured on first use; others where that cannot be built."""
    if key not in _chosen:
        if key[-1].type != "cuda" or torch.cuda.is_current_stream_capturing():
            return PLAIN
        want = _found(work, PLAIN)
        right = [tile for tile in TILES if _agrees(_found(work, tile), want)]
        times = {tile: [_ms(work, tile)] for tile in right}
        for tile in right * TURNS:  # in turns, and the least time counts: a first one can be long by chance
            times[tile].append(_ms(work, tile))
        best = min(right, key=lambda tile: min(times[tile]), default=PLAIN)
        _chosen[key] = list(dict.fromkeys((best, PLAIN, *SMALL)))
    for tile in _chosen[key]:
        if tile not in failures:
            failures[tile] = _failure(work, tile)
        if not failures[tile]:
            return tile
    told = "no kernel for rows in bits can be built here; load the model without optimise=True. The last one: "
    raise RuntimeError(told + failures[tile])


def _found(work: Callable[[CodeTile], torch.Tensor], tile: CodeTile) -> torch.Tensor | None:
    """What kernels that are built in a way compute; none where they cannot be built."""
    try:
        return work(tile).clone()
    except Exception:  # what compiling may raise is not listed anywhere
        return None


def _agrees(found: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    """Whether numbers are those of the plain way, if there is one: kernels for newer hardware are built by new code."""
    if found is None or want is None:
        return found is not None
    return bool((found - want).float().norm() <= OFF * want.float().norm())


def _failure(work: Callable[[CodeTile], torch.Tensor], tile: CodeTile) -> str:
    """Why kernels cannot be built in a way; empty where they can. A full memory is raised."""
    try:
        work(tile)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # what compiling may raise is not listed anywhere
        return f"{type(error).__name__}: {error}"
    return ""


def _ms(work: Callable[[CodeTile], torch.Tensor], tile: CodeTile) -> float:
    """Milliseconds of a few calls."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(3):
        work(tile)
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


class _Room:
    """Makes buffers for all pairs of a text's row and as many query heads as a program has."""

    def __init__(self, pairs: int, heads: int, device: torch.device) -> None:
        self.pairs, self.heads, self.device = pairs, heads, device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(self.pairs, *size, self.heads, dtype=dtype, device=self.device)
