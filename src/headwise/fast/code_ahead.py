"""The two large kernels of decode attention over rows in bits, with products that run while codes are unpacked.

They compute what `_scores` and `_sums` do, in Gluon, which says where everything lies and when products are waited for:
two products of a program are under way at once, and codes of several steps ahead are copied to shared memory, chunk by
chunk. For segments of 64 coefficients on GPUs with compute capability 9; `code_beside` imports it only there, and does
without it if Triton has no Gluon or another version of it.
Shape suffixes: as in `code_decode`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment, var-annotated, misc"
# ruff: noqa: SIM108  # branches of kernels are taken when they are built
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from headwise.fast.code_decode import _chunks, _field, _fields, _segment, _unpacking
from headwise.fast.code_sums import _job, _jobs, _kind

SEGMENT = 64  # coefficients: the only size these kernels take


def fitting_ring(wanted: int, chunks: int) -> int:
    """How many chunks of keys lie in shared memory: about as many as wanted, and whole rows or whole parts of one."""
    if wanted % chunks == 0:
        return max(2, wanted)
    return max((n for n in range(2, wanted + 1) if chunks % n == 0), default=max(2, chunks))


@gluon.jit
def _bounds(lengths, starts, b, split, S, N: gl.constexpr, WHOLE: gl.constexpr, NEAR: gl.constexpr):
    """The coded places that a text shows, and the blocks of a split: counted from place 0, so that they are aligned."""
    last = gl.load(lengths + b) - NEAR
    begin = gl.load(starts + b) + WHOLE
    first = begin // N
    each = gl.cdiv(gl.maximum(gl.cdiv(last, N) - first, 0), S)
    low = first + split * each
    return begin, last, low, gl.minimum(low + each, gl.cdiv(last, N))


@gluon.jit
def _factor(both, ODD: gl.constexpr):
    """One of two scales that lie in a number of 32 bits."""
    return (both >> (16 * ODD)).to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def _scaled(words, scale, KIND: gl.constexpr):
    """A field of every word, less its middle, times a scale: what the code stands for, times a power of two."""
    return gl.inline_asm_elementwise(_unpacking(KIND), "=r,r,r", [words, scale], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _tile_scales(own, there, PAIRS: gl.constexpr, TILE: gl.constexpr):
    """Scales of some places, of all pairs of segments."""
    found = ()
    for i in gl.static_range(PAIRS):
        found = found + (gl.load(own + i * TILE, mask=there, other=0),)
    return found


@gluon.jit
def _held(q, PLAN: gl.constexpr, SEG: gl.constexpr, M: gl.constexpr):
    """Queries of all segments in shared memory."""
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // M, M // 8], [gl.num_warps(), 1], [1, 0])
    right: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    cells = gl.arange(0, SEG, layout=gl.SliceLayout(1, narrow))[:, None] * M
    cells += gl.arange(0, M, layout=gl.SliceLayout(0, narrow))[None, :]
    found = ()
    for c in gl.static_range(_chunks(PLAN)):
        for f in gl.static_range(_fields(PLAN, c)):
            some = gl.load(q + _segment(PLAN, c, f) * (SEG * M) + cells)
            found = found + (gl.allocate_shared_memory(gl.float16, [SEG, M], right, some),)
        if _fields(PLAN, c) % 2 == 1:
            found = found + (found[0],)  # an empty segment, which is not read
    fence_async_shared()
    return found


@gluon.jit
def _copy_chunk(rings, cells, t, slot, high, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, SEG: gl.constexpr):
    """Begin to copy a chunk of a tile, to where others are read no more."""
    to = rings[CHUNK % len(rings)].index(slot)
    async_copy.async_copy_global_to_shared(
        to, cells + (t * (cells.shape[0] * CHUNKS * SEG) + CHUNK * SEG), mask=t < high
    )
    async_copy.commit_group()


@gluon.jit
def _products(
    rings, cells, held, both, t, slot, high, mma: gl.constexpr, PLAN: gl.constexpr, RING: gl.constexpr,
    DEPTH: gl.constexpr, SEG: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Products (N, M) of a tile with all queries, of which the last may still be under way."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    CHUNKS: gl.constexpr = _chunks(PLAN)
    s = warpgroup_mma_init(gl.zeros([N, M], gl.float32, mma))
    for c in gl.static_range(CHUNKS):
        async_copy.wait_group(RING - 2)
        code = rings[c % len(rings)].index(slot).load(left)
        _copy_chunk(  # the chunk that comes `RING` - 1 later, to where the one before this was
            rings, cells, t + (c + RING - 1) // CHUNKS, (slot + (c + RING - 1) // CHUNKS) % DEPTH, high,
            (c + RING - 1) % CHUNKS, CHUNKS, SEG,
        )  # fmt: skip
        for f in gl.static_range(_fields(PLAN, c)):
            factor = _factor(both[_segment(PLAN, c, f) // 2], f % 2)
            x = _scaled(code, factor[:, None].broadcast_to(N, SEG), _field(PLAN, c, f))
            s = warpgroup_mma(x, held[_segment(PLAN, c, f)], s, is_async=True)
            s = warpgroup_mma_wait(1, [s])  # while it runs, the next codes are unpacked
    return s


@gluon.jit(do_not_specialize=["S", "L"])
def _scores_ahead(
    q, words, scales, weights, tops, split_tops, split_sums, units, lengths, starts, S, L, cap,
    GP: gl.constexpr, PARTS: gl.constexpr, PLAN: gl.constexpr, SEGMENTS: gl.constexpr, SEG: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, TILE: gl.constexpr, WHOLE: gl.constexpr, NEAR: gl.constexpr,
    CAPPED: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    CHUNKS: gl.constexpr = _chunks(PLAN)
    PAIRS: gl.constexpr = SEGMENTS // 2
    R: gl.constexpr = min(RING, CHUNKS)
    pair = gl.program_id(0).to(gl.int64)
    begin, last, low, high = _bounds(lengths, starts, pair // GP, gl.program_id(1), S, N, WHOLE, NEAR)
    held = _held(q + pair * (SEGMENTS * SEG * M), PLAN, SEG, M)
    rings = ()
    for _i in gl.static_range(R):
        rings = rings + (gl.allocate_shared_memory(gl.int16, [RING // R, N, SEG], swizzled),)
    cells = words + pair // PARTS * L * (CHUNKS * SEG)
    cells += gl.arange(0, N, layout=gl.SliceLayout(1, wide))[:, None] * (CHUNKS * SEG)
    cells += gl.arange(0, SEG, layout=gl.SliceLayout(0, wide))[None, :]
    for i in gl.static_range(RING - 1):
        _copy_chunk(rings, cells, low + i // CHUNKS, i // CHUNKS, high, i % CHUNKS, CHUNKS, SEG)
    place = gl.arange(0, N, layout=gl.SliceLayout(1, gl.DotOperandLayout(0, mma, 2)))
    own = scales + pair // PARTS * L * PAIRS + place // TILE * (TILE * PAIRS) + place % TILE
    both = _tile_scales(own + low * (N * PAIRS), low < high, PAIRS, TILE)
    h = gl.arange(0, M, layout=gl.SliceLayout(0, mma))
    unit = gl.load(units + pair * M + h)
    most = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
    total = gl.zeros([N, M], gl.float32, mma)
    slot = 0  # of the rings
    for t in range(low, high):
        s = _products(rings, cells, held, both, t, slot, high, mma, PLAN, RING, RING // R, SEG, M, N)
        slot = (slot + 1) % (RING // R)
        both = _tile_scales(own + (t + 1) * (N * PAIRS), t + 1 < high, PAIRS, TILE)
        s = warpgroup_mma_wait(0, [s]) * unit[None, :]
        at = t * N + gl.arange(0, N, layout=gl.SliceLayout(1, mma))
        p, total, most, safe = _weighed(s, total, most, (at >= begin) & (at < last), cap, CAPPED)
        gl.store(tops + (pair * (L // N) + t) * M + h, safe)
        _store(weights + (pair * L + t * N) * M, p.to(gl.float16), N, M)
    async_copy.wait_group(0)
    target = (pair * S + gl.program_id(1)) * M + h
    gl.store(split_tops + target, most)
    gl.store(split_sums + target, gl.sum(total, 0))


@gluon.jit
def _weighed(s, total, most, seen, cap, CAPPED: gl.constexpr):
    """Weights of a tile relative to the highest score so far, their sums, that score, and the same with 0 for none."""
    if CAPPED:
        s = cap * (1.0 - 2.0 / (1.0 + gl.exp(2.0 * s / cap)))
    s = gl.where(seen[:, None], s * 1.4426950408889634, float("-inf"))
    top = gl.maximum(most, gl.max(s, 0))
    safe = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s - safe[None, :])
    return p, total * gl.exp2(most - safe)[None, :] + p, top, safe


@gluon.jit
def _store(to, p, N: gl.constexpr, M: gl.constexpr):
    """Write weights of a tile, 16 bytes at once."""
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // M, M // 8], [gl.num_warps(), 1], [1, 0])
    cells = to + gl.arange(0, N, layout=gl.SliceLayout(1, narrow))[:, None] * M
    gl.store(cells + gl.arange(0, M, layout=gl.SliceLayout(0, narrow))[None, :], gl.convert_layout(p, narrow))


@gluon.jit
def _copy_step(
    rings, words, scales, weights, slot, t, high, word_tile, scale_tile,
    FIELDS: gl.constexpr, SEG: gl.constexpr, M: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Begin to copy what a step needs."""
    WARPS: gl.constexpr = gl.num_warps()
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // M, M // 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    j = gl.arange(0, SEG, layout=gl.SliceLayout(1, wide))[:, None] * T
    cells = words + (j + gl.arange(0, T, layout=gl.SliceLayout(0, wide))[None, :])
    async_copy.async_copy_global_to_shared(rings[0].index(slot), cells + t * word_tile, mask=t < high)
    n = gl.arange(0, T, layout=gl.SliceLayout(1, narrow))[:, None] * M
    cells = weights + (n + gl.arange(0, M, layout=gl.SliceLayout(0, narrow))[None, :])
    async_copy.async_copy_global_to_shared(rings[1].index(slot), cells + t * (T * M), mask=t < high)
    cells = scales + gl.arange(0, T, layout=line)
    for f in gl.static_range(FIELDS):
        async_copy.async_copy_global_to_shared(
            rings[2 + f].index(slot), cells + (t * scale_tile + f * T), mask=t < high
        )
    async_copy.commit_group()


@gluon.jit
def _waited(z):
    """Sums that no product adds to any more."""
    done = warpgroup_mma_wait(0, z)
    if len(z) == 1:
        done = (done,)
    return done


@gluon.jit
def _faded(z, fade):
    """Sums relative to other scores."""
    new = ()
    for f in gl.static_range(len(z)):
        new = new + (z[f] * fade[None, :],)
    return new


@gluon.jit
def _sum_fields(
    weights, words, scales, tops, out, low, high, word_tile, scale_tile, slots, PLAN: gl.constexpr, MOST: gl.constexpr,
    JOB: gl.constexpr, SEG: gl.constexpr, M: gl.constexpr, T: gl.constexpr, EACH: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Sums over places of some fields of a chunk, and the scores that they are relative to, one for `EACH` steps."""
    FIELDS: gl.constexpr = _job(PLAN, MOST, JOB)[5]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    h = gl.arange(0, M, layout=gl.SliceLayout(0, mma))
    rings = (gl.allocate_shared_memory(gl.int16, [DEPTH, SEG, T], swizzled),)
    rings = rings + (gl.allocate_shared_memory(gl.float16, [DEPTH, T, M], right),)
    z = ()
    for _f in gl.static_range(FIELDS):
        rings = rings + (gl.allocate_shared_memory(gl.float16, [DEPTH, T], flat),)
        z = z + (gl.zeros([SEG, M], gl.float32, mma),)
    for i in gl.static_range(DEPTH - 1):
        _copy_step(rings, words, scales, weights, i, low + i, high, word_tile, scale_tile, FIELDS, SEG, M, T)
    most = gl.load(tops + low // EACH * M + h, mask=h < gl.where(low < high, M, 0), other=0.0)
    top, highest = most, most  # `top`: of the next places, read long before it is used
    slot = 0
    for t in range(low, high):
        async_copy.wait_group(DEPTH - 2)
        code = rings[0].index(slot).load(left)
        top = gl.maximum(top, highest - 60.0)
        highest = gl.maximum(highest, top)
        z = _waited(z)
        if gl.max(gl.abs(top - most), 0) > 0:
            z = _faded(z, gl.exp2(most - top))
        most = top
        top = gl.load(tops + gl.minimum(t + 1, high - 1) // EACH * M + h)
        new = ()
        for f in gl.static_range(FIELDS):
            scale = rings[2 + f].index(slot).load(gl.SliceLayout(0, left))
            x = _scaled(code, scale[None, :].broadcast_to(SEG, T), _kind(PLAN, MOST, JOB, f))
            new_f = warpgroup_mma(x, rings[1].index(slot), z[f], is_async=True)
            new = new + (warpgroup_mma_wait(1, [new_f]),)  # it may still run while the next codes are unpacked
        z = new
        free = (slot + DEPTH - 1) % DEPTH  # of the step before: its products are done
        _copy_step(rings, words, scales, weights, free, t + DEPTH - 1, high, word_tile, scale_tile, FIELDS, SEG, M, T)
        slot = (slot + 1) % DEPTH
    z = _waited(z)
    async_copy.wait_group(0)
    j = gl.arange(0, SEG, layout=gl.SliceLayout(1, mma))
    for f in gl.static_range(FIELDS):
        gl.store(out + h[None, :] * slots + f * SEG + j[:, None], z[f])
    return most


@gluon.jit(do_not_specialize=["S", "L"])
def _sums_ahead(
    weights, words, scales, tops, part, part_tops, lengths, starts, S, L,
    GP: gl.constexpr, PARTS: gl.constexpr, PLAN: gl.constexpr, MOST: gl.constexpr, SEGMENTS: gl.constexpr,
    CHUNKS: gl.constexpr, SEG: gl.constexpr, M: gl.constexpr, N: gl.constexpr, TILE: gl.constexpr,
    WHOLE: gl.constexpr, NEAR: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    unit = gl.program_id(0)  # a chunk, or part of one, so that there are few fields
    pair = gl.program_id(2).to(gl.int64)
    split = gl.program_id(1)
    begin, last, low, high = _bounds(lengths, starts, pair // GP, split, S, N, WHOLE, NEAR)
    target = pair * S + split
    weights += pair * L * M
    words += pair // PARTS * L * (CHUNKS * SEG)
    halves = scales.to(gl.pointer_type(gl.float16), bitcast=True) + pair // PARTS * L * SEGMENTS
    tops += pair * (L // N) * M
    part += target * (SEGMENTS * SEG * M)
    for job in gl.static_range(_jobs(PLAN, MOST)):
        if (unit >= _job(PLAN, MOST, job)[0]) & (unit < _job(PLAN, MOST, job)[1]):
            i = unit - _job(PLAN, MOST, job)[0]
            chunk = _job(PLAN, MOST, job)[2] + i
            segment = _job(PLAN, MOST, job)[3] + i * _job(PLAN, MOST, job)[4]
            most = _sum_fields(
                weights, words + chunk * (SEG * TILE), halves + segment * TILE, tops, part + segment * SEG,
                low * (N // TILE), high * (N // TILE), TILE * SEG * CHUNKS, TILE * SEGMENTS, SEGMENTS * SEG,
                PLAN, MOST, job, SEG, M, TILE, N // TILE, DEPTH,
            )  # fmt: skip
            if unit == 0:
                mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
                h = gl.arange(0, M, layout=gl.SliceLayout(0, mma))
                gl.store(part_tops + target * M + h, gl.where(low < high, most, float("-inf")))
