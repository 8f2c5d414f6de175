"""The second large kernel of decode attention over rows in bits, on CUDA: sums over places of values by their weights.

Each program sums a few coefficients of some places. `code_decode` has the first kernel and tells of both. Imported only
where Triton is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from headwise.fast.code_decode import _factor, _range, _scaled, planned


@triton.constexpr_function
def sum_jobs(plan, most):
    """What the programs of some places do, if each sums so many fields at most.

    By kind of program: the fields, each with its bits and bits of a word below it; how many programs, which have
    neighbouring chunks; the first chunk; its first segment; segments of a chunk.
    """
    jobs = []
    for turn in range(8):
        for chunk in range(len(plan.split())):
            planes, places, first = planned(plan, chunk)
            each = -(-len(planes) // -(-len(planes) // most))  # programs of a chunk sum about as many fields
            low = turn * each
            kinds = [(planes[f], places[f]) for f in range(low, min(low + each, len(planes)))]
            step = len(planes) + len(planes) % 2
            if kinds and jobs and jobs[-1][0] == kinds and jobs[-1][2] + jobs[-1][1] == chunk and jobs[-1][4] == step:
                jobs[-1][1] += 1
            elif kinds:
                jobs.append([kinds, 1, chunk, first + low, step])
    return jobs


@triton.constexpr_function
def _jobs(plan, most):
    return len(sum_jobs(plan, most))


@triton.constexpr_function
def _job(plan, most, number):
    """The first of the programs of a kind, the first behind them, and the numbers that go with them."""
    jobs = sum_jobs(plan, most)
    begin = sum([job[1] for job in jobs[:number]])
    return begin, begin + jobs[number][1], jobs[number][2], jobs[number][3], jobs[number][4], len(jobs[number][0])


@triton.constexpr_function
def _kind(plan, most, number, field):
    return sum_jobs(plan, most)[number][0][field]


@triton.jit
def _sum_fields(
    weights, words, scales, tops, out, low, high, word_tile, scale_tile, slots, PLAN: tl.constexpr, MOST: tl.constexpr,
    JOB: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr, T: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sums over places of some fields of a chunk, and the scores that they are relative to.

    Weights are relative to the highest score of what one program scored until then. Where another began, that may be
    lower; sums follow it, but not far below the highest score of all, where nothing counts.
    """
    FIELDS: tl.constexpr = _job(PLAN, MOST, JOB)[5]
    j, n, h = tl.arange(0, SEG), tl.arange(0, T), tl.arange(0, M)
    z = ()
    for _f in tl.static_range(FIELDS):
        z = z + (tl.zeros([SEG, M], tl.float32),)
    most = tl.load(tops + low * M + h, mask=h < tl.where(low < high, M, 0), other=0.0)
    top, highest = most, most  # `top`: of the next places, read long before it is used
    words += (n // TILE * word_tile + n % TILE)[None, :] + j[:, None] * TILE
    two = tl.arange(0, T // 2)  # neighbouring places, whose scales are read as one number
    scales += two // (TILE // 2) * scale_tile + two % (TILE // 2)
    for t in range(low * (N // T), high * (N // T)):
        w = tl.load(weights + (t * T + n)[:, None] * M + h[None, :])
        code = tl.load(words + t * (T // TILE) * word_tile)
        top = tl.maximum(top, highest - 60.0)
        highest = tl.maximum(highest, top)
        if tl.max(tl.abs(top - most), 0) > 0:
            fade = tl.exp2(most - top)
            new = ()
            for f in tl.static_range(FIELDS):
                new = new + (z[f] * fade[None, :],)
            z = new
        most = top
        top = tl.load(tops + tl.minimum((t + 1) // (N // T), high - 1) * M + h)
        new = ()
        for f in tl.static_range(FIELDS):
            both = tl.load(scales + t * (T // TILE) * scale_tile + f * (TILE // 2))
            scale = tl.join(_factor(both, 0), _factor(both, 1)).reshape([T])[None, :].broadcast_to(SEG, T)
            new = new + (tl.dot(_scaled(code, scale, _kind(PLAN, MOST, JOB, f), PACKED), w, z[f]),)
        z = new
    for f in tl.static_range(FIELDS):
        tl.store(out + h[None, :] * slots + f * SEG + j[:, None], z[f])
    return most


@triton.jit(do_not_specialize=["S", "L"])
def _sums(
    weights, words, scales, tops, part, part_tops, lengths, starts, S, L,
    GP: tl.constexpr, PARTS: tl.constexpr, PLAN: tl.constexpr, MOST: tl.constexpr, SEGMENTS: tl.constexpr,
    CHUNKS: tl.constexpr, SEG: tl.constexpr, M: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr, NEAR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)  # a chunk, or part of one, so that there are few fields
    pair = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    begin, last, low, high = _range(lengths, starts, pair // GP, split, S, N, WHOLE, NEAR)
    target = pair * S + split
    weights += pair * L * M
    words += pair // PARTS * L * (CHUNKS * SEG)
    scales += pair // PARTS * L * (SEGMENTS // 2)
    tops += pair * (L // N) * M
    part += target * (SEGMENTS * SEG * M)
    for job in tl.static_range(_jobs(PLAN, MOST)):
        if (unit >= _job(PLAN, MOST, job)[0]) & (unit < _job(PLAN, MOST, job)[1]):
            i = unit - _job(PLAN, MOST, job)[0]
            chunk = _job(PLAN, MOST, job)[2] + i
            segment = _job(PLAN, MOST, job)[3] + i * _job(PLAN, MOST, job)[4]
            most = _sum_fields(
                weights, words + chunk * (SEG * TILE), scales + segment * (TILE // 2), tops, part + segment * SEG,
                low, high, TILE * SEG * CHUNKS, TILE * (SEGMENTS // 2), SEGMENTS * SEG,
                PLAN, MOST, job, SEG, M, T, N, TILE, PACKED,
            )  # fmt: skip
            if unit == 0:
                none = tl.full([M], float("-inf"), tl.float32)
                tl.store(part_tops + target * M + tl.arange(0, M), tl.where(low < high, most, none))
