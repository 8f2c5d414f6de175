"""One new token per row against a long cache, on CUDA: the places are split over programs, a second kernel combines.

Query heads that share keys read them once, and only the filled places and true dimensions are read: widths that are no
power of two are cut into two blocks, the rest of which is masked. Lengths lie on the device, so that one captured graph
serves all of them. Imported only where Triton is. Source of the split: Dao et al., Flash-Decoding, 2023.
Shape suffixes: B rows, H query heads, G key/value heads, L places, K and V widths, S splits.
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
    cut: bool = True  # widths into two blocks; otherwise one, rounded up to a power of two
    pairs: bool = False  # places are read by twos: rows that are no multiple of 32 bytes become one that is


def blocks(width: int, cut: bool) -> tuple[int, int]:
    """Powers of two (at least 16, the second perhaps none) that hold a width."""
    whole = max(16, triton.next_power_of_2(width))
    first = whole // 2
    if not cut or width == whole or first < 16:
        return whole, 0
    second = max(16, triton.next_power_of_2(width - first))
    return (whole, 0) if first + second >= whole else (first, second)


@triton.jit
def _capped(s, cap):
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / cap)))


@triton.jit
def _filled(d, at, high, end, WIDTH: tl.constexpr, PAIR: tl.constexpr):
    """Which coordinates of which rows there are; what nobody filled is never read."""
    if PAIR == 1:
        there = (at < high)[:, None] & (d < WIDTH)[None, :]
    else:
        left = tl.where(at < high, end - at * PAIR, 0)  # places from this one on
        there = ((d // WIDTH)[None, :] < left[:, None]) & (d < WIDTH * PAIR)[None, :]
    return there


@triton.jit
def _attend(
    q, k, v, part, top, lengths, starts, scaling, cap, S,
    q_row, q_head, k_row, k_head, v_row, v_head,
    G: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PAIR: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    split = tl.program_id(1)
    b = (pair // G).to(tl.int64)
    g = (pair % G).to(tl.int64)
    end = tl.load(lengths + b)
    begin = tl.load(starts + b)
    if WINDOW > 0:
        begin = tl.maximum(begin, end - WINDOW)
    first = begin // PAIR
    last = tl.cdiv(end, PAIR)
    span = tl.cdiv(tl.cdiv(last - first, N), S) * N
    low = first + split * span
    high = tl.minimum(low + span, last)
    rows = tl.arange(0, M)
    real = rows < SHARE * PAIR
    head = rows % SHARE
    parity = rows // SHARE  # which place of a pair a row of queries looks at
    dk1 = tl.arange(0, K1)
    dv1 = tl.arange(0, V1)
    queries = q + b * q_row + (g * SHARE + head)[:, None] * q_head
    c1 = dk1[None, :] - parity[:, None] * K
    q1 = tl.load(queries + c1, mask=real[:, None] & (c1 >= 0) & (c1 < K), other=0.0)
    if K2 > 0:
        dk2 = K1 + tl.arange(0, K2)
        c2 = dk2[None, :] - parity[:, None] * K
        q2 = tl.load(queries + c2, mask=real[:, None] & (c2 >= 0) & (c2 < K), other=0.0)
    if V2 > 0:
        dv2 = V1 + tl.arange(0, V2)
        z2 = tl.zeros([M, V2], tl.float32)
    z1 = tl.zeros([M, V1], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    keys = k + b * k_row + g * k_head
    values = v + b * v_row + g * v_head
    for n in range(low, high, N):
        at = n + tl.arange(0, N)
        has_k1 = _filled(dk1, at, high, end, K, PAIR)
        k1 = tl.load(keys + at[:, None] * (K * PAIR) + dk1[None, :], mask=has_k1, other=0.0)
        s = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if K2 > 0:
            has_k2 = _filled(dk2, at, high, end, K, PAIR)
            k2 = tl.load(keys + at[:, None] * (K * PAIR) + dk2[None, :], mask=has_k2, other=0.0)
            s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
        s = s * scaling
        if CAPPED:
            s = _capped(s, cap)
        s = tl.where((at < high)[None, :], s * 1.4426950408889634, float("-inf"))
        if PAIR > 1:
            place = at[None, :] * PAIR + parity[:, None]
            s = tl.where((place >= begin) & (place < end), s, float("-inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        fade = tl.exp2(most - safe)
        p = tl.exp2(s - safe[:, None])
        total = total * fade + tl.sum(p, 1)
        most = higher
        has_v1 = _filled(dv1, at, high, end, V, PAIR)
        v1 = tl.load(values + at[:, None] * (V * PAIR) + dv1[None, :], mask=has_v1, other=0.0)
        p = p.to(v1.dtype)
        z1 = tl.dot(p, v1, z1 * fade[:, None], input_precision=PRECISION)
        if V2 > 0:
            has_v2 = _filled(dv2, at, high, end, V, PAIR)
            v2 = tl.load(values + at[:, None] * (V * PAIR) + dv2[None, :], mask=has_v2, other=0.0)
            z2 = tl.dot(p, v2, z2 * fade[:, None], input_precision=PRECISION)
    some = tl.where(total > 0, total, 1.0)
    target = ((b * G + g) * SHARE + head) * (S * PAIR) + split * PAIR + parity
    tl.store(top + target, tl.where(total > 0, most + tl.log2(some), float("-inf")), mask=real)
    c = dv1[None, :] - parity[:, None] * V
    tl.store(part + target[:, None] * V + c, z1 / some[:, None], mask=real[:, None] & (c >= 0) & (c < V))
    if V2 > 0:
        c = dv2[None, :] - parity[:, None] * V
        tl.store(part + target[:, None] * V + c, z2 / some[:, None], mask=real[:, None] & (c >= 0) & (c < V))


@triton.jit
def _combine(part, top, out, S, SPLITS: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    x = tl.load(top + row * S + split, mask=split < S, other=float("-inf"))
    most = tl.max(x, 0)
    weight = tl.where(x == float("-inf"), 0.0, tl.exp2(x - most))
    total = tl.sum(weight, 0)
    at = (row * S + split)[:, None] * V + d[None, :]
    z = tl.load(part + at, mask=(split < S)[:, None] & (d < V)[None, :], other=0.0)
    mixed = tl.sum(z * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V + d, mixed.to(out.dtype.element_ty), mask=d < V)


def splits_for(pairs: int, places: int, processors: int, tile: Tile) -> int:
    """Programs per row and key/value head, fixed when a graph is captured: enough to fill the device evenly."""
    wanted = -(-processors * tile.programs // pairs)
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
    """The heads' outputs (B, H, V). Places `starts <= l < lengths` of a row are seen, its last `window` where given."""
    tile = tile or Tile()
    (B, H, K), (G, L, V) = q_BHK.shape, (*k_BGLK.shape[1:3], v_BGLV.shape[3])
    for x, width in ((q_BHK, K), (k_BGLK, K), (v_BGLV, V)):
        if x.stride(-1) != 1 or (x.dim() == 4 and x.stride(2) != width):
            raise ValueError("the places of a cache must lie one behind the other")
    share = H // G
    pair = 2 if tile.pairs and L % 2 == 0 else 1
    S = splits_for(B * G, L, torch.cuda.get_device_properties(q_BHK.device).multi_processor_count, tile)
    out = torch.empty(B, H, V, dtype=q_BHK.dtype, device=q_BHK.device)
    part = torch.empty(B, H, S * pair, V, dtype=torch.float32, device=q_BHK.device)
    top = torch.empty(B, H, S * pair, dtype=torch.float32, device=q_BHK.device)
    (K1, K2), (V1, V2) = blocks(K * pair, tile.cut), blocks(V * pair, tile.cut)
    precise: Any = "ieee" if q_BHK.dtype == torch.float32 else "tf32"
    _attend[(B * G, S)](
        q_BHK, k_BGLK, v_BGLV, part, top, lengths_B, starts_B, scaling, softcap or 1.0, S,
        q_BHK.stride(0), q_BHK.stride(1), k_BGLK.stride(0), k_BGLK.stride(1), v_BGLV.stride(0), v_BGLV.stride(1),
        G=G, SHARE=share, K=K, V=V, K1=K1, K2=K2, V1=V1, V2=V2, M=max(16, triton.next_power_of_2(share * pair)),
        N=tile.places // pair, PAIR=pair, WINDOW=window or 0, CAPPED=softcap is not None, PRECISION=precise,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    S *= pair
    _combine[(B * H,)](part, top, out, S, SPLITS=triton.next_power_of_2(S), V=V, WIDTH=triton.next_power_of_2(V))
    return out
