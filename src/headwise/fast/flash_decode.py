"""One new token per row against a long cache, on CUDA: the places are split over programs, a second kernel combines.

Keys and values of a place lie side by side and are read as one row, so that widths such as 56 and 72 are read as well
as 64 and 64. Both products take the whole row: zeros beside the queries, and sums over keys that nobody stores, cost
less than reading rows apart. Query heads that share keys read them once, and only filled places and true dimensions are
read. Lengths lie on the device, so that one captured graph serves all of them. Imported only where Triton is. Source of
the split: Dao et al., Flash-Decoding, 2023.
Shape suffixes: B rows, H query heads, G key/value heads, L places, K and V widths, S splits; W = K + V.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How the kernel is built."""

    places: int = 64  # read at once
    warps: int = 4
    stages: int = 3  # reads in flight
    programs: int = 8  # per multiprocessor, about
    cut: bool = True  # a place into two blocks; otherwise one, rounded up to a power of two
    even: bool = False  # programs run all at once: no more than fit


def blocks(width: int, cut: bool, least: int) -> tuple[int, int]:
    """Powers of two that hold a width: one, or half of it and what the rest needs.

    Both have more columns than there are rows of queries: only then do Triton's warps share a product by columns;
    otherwise each does all of it.
    """
    whole = max(least, triton.next_power_of_2(width))
    if not cut or whole // 2 < least:
        return whole, 0
    return whole // 2, max(least, triton.next_power_of_2(width - whole // 2))


@triton.jit
def _capped(s, cap):
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / cap)))


@triton.jit
def _tile(rows, at, high, d, W: tl.constexpr, ROW: tl.constexpr):
    """Keys and values of some places, zeros where there are none: what nobody filled is never read."""
    there = (at < high)[:, None] & (d < W)[None, :]
    return tl.load(rows + at[:, None] * ROW + d[None, :], mask=there, other=0.0)


@triton.jit
def _attend(
    q, kv, part, top, lengths, starts, scaling, cap, S, q_row, q_head, kv_row, kv_head,
    G: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr, W1: tl.constexpr,
    W2: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = K + V
    split = tl.program_id(1)
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    end = tl.load(lengths + b)
    begin = tl.load(starts + b)
    if WINDOW > 0:
        begin = tl.maximum(begin, end - WINDOW)
    span = tl.cdiv(tl.cdiv(end - begin, N), S) * N
    low = begin + split * span
    high = tl.minimum(low + span, end)
    head = tl.arange(0, M)
    real = (head < SHARE)[:, None]
    d1 = tl.arange(0, W1)
    queries = q + b * q_row + (g * SHARE + head)[:, None] * q_head  # zeros beside them, where a place holds values
    q1 = tl.load(queries + d1[None, :], mask=real & (d1 < K)[None, :], other=0.0)
    z1 = tl.zeros([M, W1], tl.float32)
    if W2 > 0:
        d2 = W1 + tl.arange(0, W2)
        q2 = tl.load(queries + d2[None, :], mask=real & (d2 < K)[None, :], other=0.0)
        z2 = tl.zeros([M, W2], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M, N], tl.float32)  # summed at the end: in the loop warps would have to wait for each other
    places = kv + b * kv_row + g * kv_head
    for n in range(low, high, N):
        at = n + tl.arange(0, N)
        x1 = _tile(places, at, high, d1, W, ROW)
        s = tl.dot(q1, tl.trans(x1), input_precision=PRECISION)
        if W2 > 0:
            x2 = _tile(places, at, high, d2, W, ROW)
            if W1 < K:  # keys reach into the second block
                s = tl.dot(q2, tl.trans(x2), s, input_precision=PRECISION)
        s = s * scaling
        if CAPPED:
            s = _capped(s, cap)
        s = tl.where((at < high)[None, :], s * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        fade = tl.exp2(most - safe)
        p = tl.exp2(s - safe[:, None])
        total = total * fade[:, None] + p
        most = higher
        p = p.to(x1.dtype)
        if W1 > K:  # values begin in the first
            z1 = tl.dot(p, x1, z1 * fade[:, None], input_precision=PRECISION)
        if W2 > 0:
            z2 = tl.dot(p, x2, z2 * fade[:, None], input_precision=PRECISION)
    total = tl.sum(total, 1)
    some = tl.where(total > 0, total, 1.0)
    target = ((b * G + g) * SHARE + head) * S + split
    tl.store(top + target, tl.where(total > 0, most + tl.log2(some), float("-inf")), mask=head < SHARE)
    sums = part + target[:, None] * V - K  # those over keys are of no use
    tl.store(sums + d1[None, :], z1 / some[:, None], mask=real & ((d1 >= K) & (d1 < W))[None, :])
    if W2 > 0:
        tl.store(sums + d2[None, :], z2 / some[:, None], mask=real & ((d2 >= K) & (d2 < W))[None, :])


@triton.jit(do_not_specialize=["S"])
def _combine(part, top, out, S, V: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.program_id(1) * D + tl.arange(0, D)
    x = tl.load(top + row * S + split, mask=split < S, other=float("-inf"))
    most = tl.max(x, 0)
    weight = tl.where(x == float("-inf"), 0.0, tl.exp2(x - most))
    total = tl.sum(weight, 0)
    there = (weight > 0)[:, None] & (d < V)[None, :]
    z = tl.load(part + ((row * S + split) * V)[:, None] + d[None, :], mask=there, other=0.0)
    mixed = tl.sum(z * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V + d, mixed.to(out.dtype.element_ty), mask=d < V)


def splits_for(pairs: int, places: int, processors: int, tile: Tile) -> int:
    """Programs per row and key/value head, fixed when a graph is captured: enough to fill the device evenly."""
    wanted = processors * tile.programs // pairs if tile.even else -(-processors * tile.programs // pairs)
    return max(1, min(wanted, -(-places // tile.places), 128))


def flash_decode(
    q_BHK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The heads' outputs (B, H, V). Places `starts <= l < lengths` of a row are seen, its last `window` where given.

    Keys and values are views of one buffer, as a FastCache has them (`side_by_side`).
    """
    K, tile = q_BHK.shape[2], tile or Tile()
    if v_BGLV.data_ptr() != k_BGLK.data_ptr() + K * k_BGLK.element_size():
        raise ValueError("keys and values of a place must lie side by side")
    M = max(16, triton.next_power_of_2(q_BHK.shape[1] // k_BGLK.shape[1]))
    W1, W2 = blocks(K + v_BGLV.shape[3], tile.cut, 2 * M)
    seen, how = (lengths_B, starts_B, scaling, softcap, window), dict(W1=W1, W2=W2, M=M)
    return run_splits(_attend, q_BHK, (k_BGLK,), v_BGLV, *seen, tile, how, triton.next_power_of_2(v_BGLV.shape[3]))


def run_splits(
    attend: Any, q_BHK: torch.Tensor, read: tuple[torch.Tensor, ...], v_BGLV: torch.Tensor, lengths_B: torch.Tensor,
    starts_B: torch.Tensor, scaling: float, softcap: float | None, window: int | None, tile: Tile, how: dict[str, int],
    columns: int,
) -> torch.Tensor:  # fmt: skip
    """Run a kernel whose programs each attend to some places, and combine what they found, `columns` at a time.

    `read` are the buffers that it reads, keys first; `how` has its other sizes.
    """
    k_BGLK = read[0]
    if k_BGLK.stride() != v_BGLV.stride() or k_BGLK.stride(3) != 1 or q_BHK.stride(2) != 1:
        raise ValueError("keys and values of a place must have the same strides, and numbers of a row lie side by side")
    (B, H, K), (G, L, V) = q_BHK.shape, (*k_BGLK.shape[1:3], v_BGLV.shape[3])
    pairs = B * G * how.get("PARTS", 1)
    S = splits_for(pairs, L, torch.cuda.get_device_properties(q_BHK.device).multi_processor_count, tile)
    out = torch.empty(B, H, V, dtype=q_BHK.dtype, device=q_BHK.device)
    part = torch.empty(B, H, S, V, dtype=torch.float32, device=q_BHK.device)
    top = torch.empty(B, H, S, dtype=torch.float32, device=q_BHK.device)
    attend[(pairs, S)](
        q_BHK, *read, part, top, lengths_B, starts_B, scaling, softcap or 1.0, S,
        q_BHK.stride(0), q_BHK.stride(1), k_BGLK.stride(0), k_BGLK.stride(1),
        G=G, SHARE=H // G, K=K, V=V, ROW=k_BGLK.stride(2), N=tile.places, WINDOW=window or 0,
        CAPPED=softcap is not None, PRECISION="ieee" if q_BHK.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **how,
    )  # fmt: skip
    grid = (B * H, -(-V // columns))
    _combine[grid](part, top, out, S, V=V, SPLITS=triton.next_power_of_2(S), D=columns)
    return out
